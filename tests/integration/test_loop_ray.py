"""A run on Ray actors trains on the same samples as the same run in processes."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.integration.conftest import NORMAL, Pool
from tests.support.bridge import RecordingLoop, configuration, sample_keys, training
from tests.support.live import LiveServer
from tests.support.server import COMMON
from trainer_bridge.progress import read_rows

pytestmark = pytest.mark.timeout(1800)
"""Server starts, which are slow on a busy machine."""


class ServerKilledByRay(RecordingLoop):
    """A loop whose server's actor is killed −9 after the first group of round 2; the server goes with it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.warnings: list[str] = []
        self.killed = False
        stream, warn = self.engines.client.stream, self.progress.warn

        def dying_stream(**body: Any) -> Iterator[Any]:
            for event in stream(**body):
                yield event
                if body["round_id"].endswith(".2") and not self.killed:
                    self.killed = True
                    server: Any = self.engines.each[0].process
                    pid = server.actor.__ray_call__.remote(lambda _: os.getpid())
                    os.kill(ray.get(pid), signal.SIGKILL)

        def received(text: str) -> None:
            self.warnings.append(text)
            warn(text)

        self.engines.client.stream = dying_stream  # type: ignore[method-assign]
        self.progress.warn = received  # type: ignore[method-assign]


def test_ray_actors_train_on_the_same_samples_as_processes_despite_kills(
    pool: Pool,
    normal: LiveServer,
    models: Callable[[str, int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every round waits for all samples, so that tokens depend on seeds and weights only."""
    model, same = models("qwen3", 0), {"partial_rollout": False, "over_sampling_batch_size": 4, "lr": 1e-5}
    same |= {"num_rollout": 3, "trainer_processes": 2}
    with training(configuration(tmp_path / "processes", normal.server.url, model, **same)) as plain:
        plain.run()
    monkeypatch.setenv("SGLANG_APRIL_CHECK", "1")
    pool.make_room()
    own = {"server": None, "server_flags": [*COMMON, *NORMAL], "ray": True}
    made = configuration(tmp_path / "actors", "", model, **same, **own)
    others = set(psutil.Process().children(recursive=True))
    with training(made, ServerKilledByRay) as loop:
        assert loop.run().step == 3
        state = loop.engines.client.state()
        started = set(psutil.Process().children(recursive=True)) - others
    assert loop.killed
    assert [text for text in loop.warnings if "the engine is lost" in text]
    assert state["http"]["journal"]["warnings"] == []
    drawn = [
        [{(r.prompt_id, r.index): r.output_ids.tolist() for r in part} for part in each.trained]
        for each in (plain, loop)
    ]
    assert drawn[0] == drawn[1]
    assert [len(sample_keys(part)) for part in loop.trained] == [16, 16, 16]
    losses = [[row["loss"] for row in read_rows(tmp_path / n / "run" / "steps.jsonl")] for n in ("processes", "actors")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert not psutil.wait_procs(started, 30)[1], "Ray leaves nothing behind"
