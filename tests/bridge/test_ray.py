"""Trainer ranks and servers in Ray actors behave like those in processes; the death of an actor is detected."""

import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from examples.tiny_model import make
from tests.bridge.reference import micro_batches
from tests.bridge.test_rollout_engine import HTTP_SERVER, pid
from tests.bridge.two_steps import COUNTS, LOSS, check_step, check_weights, settings, train_two_steps, weights
from tests.support.live import until
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.megatron.worker_group import make_trainer
from trainer_bridge.megatron.workers import TrainerFailed
from trainer_bridge.ray_cluster import ClusterCapacityError, RayCluster
from trainer_bridge.rollout_engine import RolloutEngine
from trainer_bridge.server_process import EngineGoneError
from trainer_bridge.validate import check

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A local Ray, which must leave no process behind."""
    before = psutil.Process().children(recursive=True)
    cluster = RayCluster()
    started = [child for child in psutil.Process().children(recursive=True) if child not in before]
    yield cluster
    cluster.close()
    _, left = psutil.wait_procs(started, 30)
    assert not left


def config(**fields: Any) -> Config:
    return Config(hf_checkpoint="m", prompt_data="d", **fields)


def pid_of(actor: Any) -> int:
    """Process id of an actor."""
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ray_address": "auto"}, "ray_address: needs ray: true"),
        ({"ray": True, "colocate": True}, "colocate: trainer and engine cannot share GPUs under Ray"),
    ],
)
def test_incompatible_settings_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(config(**fields))


def test_missing_ray_installation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    check(config(ray=True))
    monkeypatch.setattr("importlib.metadata.version", missing)
    check(config())
    with pytest.raises(ConfigError, match=r"^ray: is not installed; pip install 'sglang-april\[ray\]' installs it$"):
        check(config(ray=True))


def test_two_actors_train_like_two_processes(cluster: RayCluster, tmp_path: Path) -> None:
    """Then one is killed in the middle of a step, and two processes resume from the checkpoint."""
    model = Path(make(tmp_path / "qwen3", dtype="float32"))
    trainer_settings = settings(model, world_size=2)
    workers = make_trainer(trainer_settings, cluster)
    recorded = train_two_steps(workers, tmp_path / "actors")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        workers.load(tmp_path / "nowhere")
    kill_one_rank(workers)
    processes = make_trainer(trainer_settings)
    try:
        processes.load(tmp_path / "actors" / "saved")
        check_step(processes.step(micro_batches(COUNTS[1]), LOSS), recorded.reports[1])
        check_weights(weights(processes, tmp_path / "again"), recorded.weights[1])
    finally:
        processes.close()


def kill_one_rank(group: Any) -> None:
    """Stop it, so that the other rank waits for it in a collective, then kill it."""
    other, victim = (psutil.Process(pid_of(actor)) for actor in group.workers.actors)
    victim.suspend()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(group.step, micro_batches(2), LOSS)
        victim.kill()
        with pytest.raises(TrainerFailed, match="trainer rank 1 has died"):
            step.result(300)
    other.wait(60)
    with pytest.raises(TrainerFailed, match="rank"):
        group.step(micro_batches(2), LOSS)


def engine(folder: Path, cluster: RayCluster, code: str = HTTP_SERVER) -> tuple[RolloutEngine, Any]:
    """An engine whose server is a short Python script in an actor, and its `RayServer`."""
    rollout_engine = RolloutEngine(config(ray=True), folder, cluster=cluster)
    host, port = rollout_engine.url.removeprefix("http://").split(":")
    command = [sys.executable, "-c", code.replace("127.0.0.1", host), port]
    rollout_engine._command = lambda: command  # type: ignore[method-assign]
    return rollout_engine, rollout_engine.process


def test_server_dies_with_its_actor_and_is_restarted_at_its_address(cluster: RayCluster, tmp_path: Path) -> None:
    rollout_engine, server = engine(tmp_path, cluster)
    rollout_engine.wait_until_ready()
    process, actor = psutil.Process(pid(tmp_path)), pid_of(server.actor)
    assert server.alive
    os.kill(actor, signal.SIGKILL)
    process.wait(30)
    until(lambda: not server.alive, "the end of the actor")
    rollout_engine.wait_until_ready()
    assert (server.alive, pid(tmp_path) != process.pid) == (True, True)
    again = psutil.Process(pid(tmp_path))
    again.kill()
    until(lambda: not server.alive, "the end of the server")
    rollout_engine.wait_until_ready()
    last, actor = psutil.Process(pid(tmp_path)), pid_of(server.actor)
    rollout_engine.close()
    assert not last.is_running()
    until(lambda: not psutil.pid_exists(actor), "the end of the actor")


@pytest.mark.parametrize("waits", [True, False])
def test_ctrl_c_ends_a_server_that_has_lost_its_place(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Its actor has died, and its GPUs are gone. Ray waits for others, or refuses the node at once."""
    rollout_engine, server = engine(tmp_path, cluster)
    rollout_engine.wait_until_ready()
    monkeypatch.setattr(cluster, "has_gpus", True)
    if waits:
        monkeypatch.setattr(server, "_node", None)
    monkeypatch.setattr("trainer_bridge.ray_cluster.PLACEMENT_TIMEOUT_S", 90.0)
    monkeypatch.setattr("trainer_bridge.rollout_engine.START_TIMEOUT_S", 0.1)
    first = server.actor
    os.kill(pid_of(first), signal.SIGKILL)
    until(lambda: not server.alive, "the end of the actor")
    with ThreadPoolExecutor(2) as threads:
        ready = threads.submit(rollout_engine.wait_until_ready)
        until(lambda: server.actor is not first, "another actor is created")
        threads.submit(rollout_engine.end_server).result(60)
        assert isinstance(ready.exception(30), EngineGoneError)
    rollout_engine.close()


def test_server_that_exits_at_startup_is_reported_with_its_log(cluster: RayCluster, tmp_path: Path) -> None:
    rollout_engine, _ = engine(tmp_path, cluster, "raise SystemExit(3)")
    with pytest.raises(EngineGoneError, match=r"did not start: .*server\.log"):
        rollout_engine.wait_until_ready()
    rollout_engine.close()


def test_actors_get_the_environment_of_engine_and_trainer(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    class EnvironmentActor:
        def variables(self) -> list[str | None]:
            return [os.environ.get(name) for name in ("SGLANG_APRIL", "UNRELATED")]

    monkeypatch.setenv("SGLANG_APRIL", '{"quota": 1}')
    monkeypatch.setenv("UNRELATED", "1")
    actor = cluster.create_actor(EnvironmentActor, gpus=1)
    assert ray.get(actor.variables.remote()) == ['{"quota": 1}', None]


def test_missing_gpus_are_reported_after_a_timeout(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "has_gpus", True)
    monkeypatch.setattr("trainer_bridge.ray_cluster.PLACEMENT_TIMEOUT_S", 0.5)
    for start in (
        lambda: make_trainer(settings(tmp_path, world_size=2), cluster),
        lambda: RolloutEngine(config(ray=True), tmp_path, cluster=cluster),
    ):
        with pytest.raises(
            ClusterCapacityError, match=r"ray: started only 0 of \d actors \(.*\) within 0.5 s; the cluster has 0 GPUs"
        ):
            start()
