"""Ray, where it is asked for: ranks and servers in actors do what they do in processes; their deaths are noticed."""

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
from tests.bridge.test_rollout_engine import SERVES, pid
from tests.bridge.two_steps import COUNTS, LOSS, check_step, check_weights, settings, tell, weights
from tests.support.live import until
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.megatron.worker_group import make_trainer
from trainer_bridge.megatron.workers import TrainerFailed
from trainer_bridge.ray_cluster import NoRoomError, RayCluster
from trainer_bridge.rollout_engine import RolloutEngine
from trainer_bridge.server_process import EngineLostError
from trainer_bridge.validate import check


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One of our own; nothing of it is left afterwards."""
    before = psutil.Process().children(recursive=True)
    made = RayCluster()
    started = [child for child in psutil.Process().children(recursive=True) if child not in before]
    yield made
    made.close()
    _, left = psutil.wait_procs(started, 30)
    assert not left


def config(**fields: Any) -> Config:
    return Config(hf_checkpoint="m", prompt_data="d", **fields)


def pid_of(actor: Any) -> int:
    """The process of an actor."""
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ray_address": "auto"}, "ray_address: needs ray: true"),
        ({"ray": True, "colocate": True}, "colocate: trainer and engine cannot share GPUs under Ray"),
    ],
)
def test_what_does_not_fit_together(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(config(**fields))


def test_asked_for_and_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    check(config(ray=True))
    monkeypatch.setattr("importlib.metadata.version", missing)
    check(config())
    with pytest.raises(ConfigError, match=r"^ray: is not installed; pip install 'sglang-april\[ray\]' installs it$"):
        check(config(ray=True))


def test_two_actors_take_the_step_that_two_processes_take(cluster: RayCluster, tmp_path: Path) -> None:
    """Then one dies in the middle of a step, by kill −9, and a team of processes goes on from its checkpoint."""
    model = Path(make(tmp_path / "qwen3", dtype="float32"))
    asked = settings(model, world_size=2)
    team = make_trainer(asked, cluster)
    told = tell(team, tmp_path / "actors")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        team.load(tmp_path / "nowhere")
    one_rank_dies(team)
    processes = make_trainer(asked)
    try:
        processes.load(tmp_path / "actors" / "saved")
        check_step(processes.step(micro_batches(COUNTS[1]), LOSS), told.reports[1])
        check_weights(weights(processes, tmp_path / "again"), told.weights[1])
    finally:
        processes.close()


def one_rank_dies(team: Any) -> None:
    """It is stopped, so that the other waits for it in a collective; then it is killed −9."""
    other, victim = (psutil.Process(pid_of(actor)) for actor in team._ranks.actors)
    victim.suspend()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(team.step, micro_batches(2), LOSS)
        victim.kill()
        with pytest.raises(TrainerFailed, match="trainer rank 1 has died"):
            step.result(300)
    other.wait(60)
    with pytest.raises(TrainerFailed, match="rank"):
        team.step(micro_batches(2), LOSS)


def engine(folder: Path, cluster: RayCluster, code: str = SERVES) -> tuple[RolloutEngine, Any]:
    """An engine whose server is a few lines of Python, in an actor."""
    made = RolloutEngine(config(ray=True), folder, cluster=cluster)
    host, port = made.url.removeprefix("http://").split(":")
    made._command = lambda: [sys.executable, "-c", code.replace("127.0.0.1", host), port]  # type: ignore[method-assign]
    return made, made._own


def test_a_server_dies_with_its_actor_and_is_started_again_at_its_address(cluster: RayCluster, tmp_path: Path) -> None:
    made, own = engine(tmp_path, cluster)
    made.ready()
    server, actor = psutil.Process(pid(tmp_path)), pid_of(own._actor)
    assert own.alive
    os.kill(actor, signal.SIGKILL)
    server.wait(30)
    until(lambda: not own.alive, "the end of the actor")
    made.ready()
    assert (own.alive, pid(tmp_path) != server.pid) == (True, True)
    again = psutil.Process(pid(tmp_path))
    again.kill()
    until(lambda: not own.alive, "the end of the server")
    made.ready()
    last, actor = psutil.Process(pid(tmp_path)), pid_of(own._actor)
    made.close()
    assert not last.is_running()
    until(lambda: not psutil.pid_exists(actor), "the end of the actor")


def test_a_server_that_ends_at_its_start_is_lost_and_its_log_named(cluster: RayCluster, tmp_path: Path) -> None:
    made, _ = engine(tmp_path, cluster, "raise SystemExit(3)")
    with pytest.raises(EngineLostError, match=r"server\.log"):
        made.ready()
    made.close()


def test_actors_get_the_variables_that_engine_and_trainer_read(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked:
        def told(self) -> list[str | None]:
            return [os.environ.get(name) for name in ("SGLANG_APRIL", "UNRELATED")]

    monkeypatch.setenv("SGLANG_APRIL", '{"quota": 1}')
    monkeypatch.setenv("UNRELATED", "1")
    actor = cluster.actor(Asked, gpus=1)
    assert ray.get(actor.told.remote()) == ['{"quota": 1}', None]


def test_gpus_that_the_cluster_has_not_are_not_waited_for_for_ever(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "has_gpus", True)
    monkeypatch.setattr("trainer_bridge.ray_cluster.PLACED_WITHIN_S", 0.5)
    for start in (
        lambda: make_trainer(settings(tmp_path, world_size=2), cluster),
        lambda: RolloutEngine(config(ray=True), tmp_path, cluster=cluster),
    ):
        with pytest.raises(NoRoomError, match=r"ray: has started 0 of \d actors \(.*\) within 0.5 s; it has 0 GPUs"):
            start()
