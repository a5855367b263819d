"""Rows of a run: repeated steps replace their rows, incomplete lines are ignored, and the report shows all rows."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainer_bridge.checkpoints import LoopState
from trainer_bridge.cli import main
from trainer_bridge.progress import RunProgress, read_rows
from trainer_bridge.report import PLOTS


def row(step: int, **fields: Any) -> dict[str, Any]:
    decile = {"length": 4.0, "staleness": 0.5, "clip_share": 0.1, "mask_share": 0.0, "pull": 2.0, "reward": 0.5}
    return {
        "step": step,
        "samples_so_far": 16 * step,
        "seconds_so_far": 2.5 * step,
        "reward": 0.1 * step,
        "lengths": [4, 8, 30],
        "turns": [1, 1, 1],
        "delivered_tokens": 42,
        "delivered_tokens_per_s": 21.0,
        "generate_s": 2.0,
        "off_policy_share": 0.25,
        "hybrid_share": 0.1,
        "over_three_versions": 0.0,
        "staleness": 2,
        "tokens_by_age": {"0": 30, "2": 12},
        "mean_running": 3.0,
        "timeline": [[0.0, 4], [1.5, 1]],
        "deciles": [decile] * 10,
        "masked": 0,
        "rejected": 1,
        "unscored": 0,
        "replaced": 1,
        "problems": [],
        "warnings": ["ratio_mean is 3, outside 0.8 to 1.25"] if step == 2 else [],
        "seconds": {"rollout": 2.0, "train": 0.5},
        **fields,
    }


HELD_OUT = {"reward": 0.5, "reward_se": 0.02, "prompts": 64}


@pytest.fixture
def progress(tmp_path: Path) -> RunProgress:
    return RunProgress(tmp_path, Console(file=(tmp_path / "console").open("w"), width=200))


def test_repeated_steps_replace_their_rows(progress: RunProgress, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        progress.step(row(step))
        progress.evaluated(LoopState(step=step), HELD_OUT)
    with (tmp_path / "steps.jsonl").open("a") as out:
        out.write('{"step": 4, "rew')
    assert [r["step"] for r in read_rows(tmp_path / "steps.jsonl")] == [1, 2, 3]
    progress.resume(2)
    assert progress.evaluated_steps == {1, 2}
    progress.step(row(3, reward=9.0))
    assert [(r["step"], r["reward"]) for r in read_rows(tmp_path / "steps.jsonl")][2] == (3, 9.0)


def test_console_line_and_events_of_a_step(progress: RunProgress, tmp_path: Path) -> None:
    progress.step(row(2, problems=["the reward died"]))
    progress.step(row(3, delivered_tokens_per_s=None))
    progress.close()
    output = (tmp_path / "console").read_text()
    for part in (
        "step    2",
        "0.200",
        "8/30",
        "21 tok/s",
        " – tok/s",
        "25%",
        "rollout 2.0",
        "outside 0.8",
        "the reward died",
    ):
        assert part in output
    assert any((tmp_path / "events").iterdir())


def test_report_has_every_plot_and_warning(
    progress: RunProgress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        progress.step(row(step))
    progress.evaluated(LoopState(step=3, samples=48), HELD_OUT)
    assert main(["report", str(tmp_path)]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    assert page.count("<img") == len(PLOTS)
    assert "step 2: ratio_mean is 3" in page
    assert "0.5000 → 0.5000" in page


def test_report_of_an_empty_step(progress: RunProgress, tmp_path: Path) -> None:
    empty = {
        "reward": None,
        "lengths": [],
        "turns": [],
        "deciles": [],
        "timeline": [],
        "tokens_by_age": {},
        "generate_s": 0.0,
    }
    progress.step(row(1, **empty))
    assert main(["report", str(tmp_path)]) == 0


def test_report_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no steps.jsonl" in capsys.readouterr().err
