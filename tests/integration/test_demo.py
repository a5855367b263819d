"""The demo's training part on live servers: both runs, rows, token accounting, picture. No gain is asserted."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from examples.april_demo.__main__ import run_training
from examples.april_demo.settings import Settings, Training
from examples.april_demo.training import training_metrics
from examples.sorting_task import ListLengths
from tests.support.live import LiveServer
from trainer_bridge.progress import read_rows


def test_both_runs_train_and_fill_their_rows(
    normal: LiveServer, second: LiveServer, models: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """They take turns, each on its server."""
    training = Training(
        steps=2, groups=3, samples_per_group=2, pool=6, held_out=6, eval_interval=1, checkpoint=models("qwen3", 0)
    )
    settings = Settings(lengths=ListLengths(2, 6), training=training)
    rows = [{"variant": name, **THROUGHPUT, **training_metrics(None)} for name in ("synchronous", "outside", "april")]
    console = Console(record=True, width=200)
    before = [live.version for live in (normal, second)]
    run_training([normal.server.url, second.server.url], rows, settings, tmp_path, console)

    synchronous, outside, april = rows
    assert outside["training"] is None
    for row in (synchronous, april):
        steps = read_rows(tmp_path / "training" / row["variant"] / "steps.jsonl")
        assert [step["groups"] for step in steps] == [3, 3]
        delivered = [tuple(sample) for step in steps for sample in step["delivered"]]
        assert len(set(delivered)) == len(delivered) == row["training"]["samples"] == 12
        assert [point["step"] for point in row["training"]["evaluations"]] == [0, 1, 2]
        assert row["training"]["held_out"] == 6
        assert row["seconds"] > 0
    # Same weights, same held-out problems, same noise.
    assert april["reward_before"] == pytest.approx(synchronous["reward_before"], abs=1e-4)
    assert synchronous["training"]["off_policy_share"] == 0.0
    assert (tmp_path / "learning.png").exists()
    assert "training: synchronous and april, one step each in turn" in console.export_text(clear=False)
    lines = re.findall(r"^(synchronous|april) +step +(\d+)  reward", console.export_text(), re.MULTILINE)
    assert lines == [("synchronous", "1"), ("april", "1"), ("synchronous", "2"), ("april", "2")]
    # A push before the first step and one after each.
    assert [live.version for live in (normal, second)] == [version + 3 for version in before]
    for live in (normal, second):
        runs = live.server.state()["runs"]
        assert not any(run["groups"] for name, run in runs.items() if name.startswith("demo-"))


THROUGHPUT = {
    **dict.fromkeys(("delivered_tokens_per_s", "off_policy_share", "mean_running"), 1.0),
    **dict.fromkeys(("tokens_after_end", "reprefilled_tokens", "samples_lost"), 0),
}
"""What the first part would have filled in."""
