"""A run that starts its own server, and whose server is killed −9 in the middle of a round."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import NORMAL, Pool
from tests.support.bridge import RecordingLoop, configuration, sample_keys, training
from tests.support.server import COMMON
from trainer_bridge.progress import read_rows

pytestmark = pytest.mark.timeout(1800)
"""Server starts, which are slow on a busy machine."""

MOMENTS = ("round",)
"""When the server is killed; each kill costs one start. `push` is before the weights of step 3."""


class Killed(RecordingLoop):
    """A loop under which the server dies: after the first group of round 2, and before the weights of step 3."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kills: list[str] = []
        self.warnings: list[str] = []
        stream, push, warn = self.engines.client.stream, self.trainer.push, self.progress.warn

        def dying_stream(**body: Any) -> Iterator[Any]:
            for event in stream(**body):
                yield event
                if body["round_id"].endswith(".2"):
                    self.kill("round")

        def dying_push(version: int | None = None) -> Any:
            if self.state.step == 3:
                self.kill("push")
            return push(version)

        def received(text: str) -> None:
            self.warnings.append(text)
            warn(text)

        self.engines.client.stream = dying_stream  # type: ignore[method-assign]
        self.trainer.push = dying_push  # type: ignore[method-assign]
        self.progress.warn = received  # type: ignore[method-assign]

    def kill(self, when: str) -> None:
        """Once for each moment."""
        if when in MOMENTS and when not in self.kills:
            self.kills.append(when)
            process: Any = self.engines.each[0].process
            os.killpg(process.pid, signal.SIGKILL)


def test_run_survives_kills_of_its_own_server(
    pool: Pool, models: Callable[[str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample is lost or trained on twice, and partials resume after the kill."""
    monkeypatch.setenv("SGLANG_APRIL_CHECK", "1")
    pool.make_room()
    made = configuration(
        tmp_path, "", models("qwen3", 0), num_rollout=3, server=None, server_flags=[*COMMON, *NORMAL], on_end="drain"
    )
    with training(made, Killed) as loop:
        assert loop.run().step >= 3
        state = loop.engines.client.state()
        kills, warnings = loop.kills, loop.warnings
    assert kills == list(MOMENTS)
    assert len([text for text in warnings if "the engine is lost" in text]) >= len(MOMENTS)
    assert state["http"]["journal"]["warnings"] == []
    assert state["runs"][loop.run_name]["groups"] == 0, "nothing is left behind"
    done = read_rows(Path(made.save) / "steps.jsonl")
    assert [row["step"] for row in done] == list(range(1, len(done) + 1))
    assert [row["groups"] for row in done[:3]] == [4] * 3
    assert [row["version"] for row in done] == list(range(1, len(done) + 1)), (
        "one version a step, whichever process died"
    )
    samples = Counter(key for part in loop.trained for key in sample_keys(part))
    assert set(samples.values()) == {1}
    assert len({prompt for prompt, _ in samples}) * 4 == len(samples) == done[-1]["samples_so_far"]
    assert all(report.stats.row()["on_policy_gap"] < 1e-4 for report in loop.reports), "the right weights are back"
    assert sum(row["off_policy_share"] for row in done[1:]) > 0
