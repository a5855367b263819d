"""The demo's training part on live servers: both runs, rows, token accounting, picture. No gain is asserted."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from examples.april_demo.__main__ import run_training
from examples.april_demo.settings import AGENT_TRAINING, Settings, Training
from examples.april_demo.training import training_metrics
from examples.sorting_task import ListLengths
from tests.integration.conftest import NORMAL, Pool
from tests.support.live import LiveServer, live_server
from trainer_bridge.progress import read_rows


@pytest.fixture
def agents(pool: Pool) -> Iterator[LiveServer]:
    """A server with the checkpoint that the demo's agents start from."""
    model, flags = AGENT_TRAINING.checkpoint, [*NORMAL, "--context-length=1024"]
    with live_server(pool.get("calculator", flags, forked=True, model=model), lambda _seed: model) as live:
        yield live
    live.server.stop()


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


def test_agents_train_in_both_runs(agents: LiveServer, tmp_path: Path) -> None:
    """`--agent`: on one server the runs follow each other. Their samples are trajectories of several turns."""
    sizes = replace(AGENT_TRAINING, steps=1, groups=2, samples_per_group=4, pool=3, held_out=4, eval_interval=1)
    settings = Settings(agent=True, training=sizes)
    rows = [{"variant": name, **training_metrics(None)} for name in ("synchronous", "april")]
    console = Console(record=True, width=200)
    run_training([agents.server.url], rows, settings, tmp_path, console)
    for row in rows:
        (step,) = read_rows(tmp_path / "training" / row["variant"] / "steps.jsonl")
        assert (step["groups"], len(step["delivered"])) == (2, 8)
        assert row["training"]["turns_max"] > 1, "the calculator is called"
        assert [point["step"] for point in row["training"]["evaluations"]] == [0, 1]
    assert (tmp_path / "learning.png").exists()
    left = agents.server.state()["trajectories"]
    assert {name.rpartition("-")[0] for name in left} == {"demo-synchronous", "demo-april"}
    assert not any(run["undelivered"] for run in left.values())


THROUGHPUT = {
    **dict.fromkeys(("delivered_tokens_per_s", "off_policy_share", "mean_running"), 1.0),
    **dict.fromkeys(("tokens_after_end", "reprefilled_tokens", "samples_lost"), 0),
}
"""What the first part would have filled in."""
