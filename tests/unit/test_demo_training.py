"""The demo's training runs: their configurations, and metrics, table and picture from made-up rows."""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.rollout.__main__ import arguments as bench_arguments
from examples.april_demo import __main__ as demo
from examples.april_demo import other_load as measure
from examples.april_demo.report import draw_learning, show_training
from examples.april_demo.settings import AGENT_TRAINING, CHECKPOINTS, Settings, Training
from examples.april_demo.training import Trained, configuration, prepare, training_metrics
from examples.sorting_task import EOS, SORT, problems, reward, write_prompts
from examples.train_checkpoints import IGNORED, give_up
from trainer_bridge.data import PromptData, read_rows
from trainer_bridge.rewards import RewardSample
from trainer_bridge.validate import check

SETTINGS = Settings(training=Training(steps=2, groups=4, samples_per_group=2, pool=8, held_out=5))


def step(**fields: Any) -> dict[str, Any]:
    return {
        "delivered_tokens": 100,
        "generate_s": 2.0,
        "off_policy_share": 0.5,
        "lengths": [20, 80],
        "seconds": {"rollout": 2.0, "train": 1.0},
        **fields,
    }


def evaluation(at: int, reward: float, error: float) -> dict[str, Any]:
    row = {"step": at, "samples_so_far": 8 * at, "seconds_so_far": 3.0 * at, "reward": reward, "reward_se": error}
    return row | {"prompts": 5}


def trained(after: float = 0.8) -> Trained:
    steps = [step(), step(delivered_tokens=300, off_policy_share=0.1, seconds={"rollout": 2.0, "push": 0.5})]
    return Trained(steps, [evaluation(0, 0.5, 0.1), evaluation(2, after, 0.05)])


def test_metrics_of_a_run() -> None:
    row = training_metrics(trained())
    assert (row["reward_before"], row["reward_after"], row["reward_se"], row["seconds"]) == (0.5, 0.8, 0.1, 6.0)
    inner = row["training"]
    assert inner["delivered_tokens_per_s"] == 100.0
    assert inner["off_policy_share"] == (0.5 * 100 + 0.1 * 300) / 400
    assert (inner["steps"], inner["samples"], inner["seconds_per_step"]) == (2, 16, 3.0)
    assert (inner["length_mean"], inner["length_max"]) == (50, 80)
    assert inner["seconds_by_part"] == {"rollout": 4.0, "train": 1.0, "push": 0.5}
    assert [point["reward"] for point in inner["evaluations"]] == [0.5, 0.8]


def test_children_are_no_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """All CPU time of the machine is that of a child here: running, and ended."""
    monkeypatch.setattr(measure, "_busy", lambda: busy[0])
    busy, spin = (
        [100.0],
        [sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass\nprint(flush=True); input()"],
    )
    child = subprocess.Popen(spin, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child, measure.other_load() as while_it_runs:
        assert child.stdout
        child.stdout.readline()
        busy[0] += 1.0
        child.kill()
        child.wait()
    assert while_it_runs.share < 0.5
    monkeypatch.setattr(measure, "_own", lambda: 0.0)
    with measure.other_load() as others:
        busy[0] += 1000.0
    assert others.share == 1.0


def test_a_gain_counts_above_two_standard_errors() -> None:
    assert trained(after=0.71).learned
    assert not trained(after=0.69).learned


def test_a_variant_that_did_not_train_has_the_fields_without_values() -> None:
    row = training_metrics(None)
    assert row.keys() == training_metrics(trained()).keys()
    assert set(row.values()) == {None}


def test_table_and_picture(tmp_path: Path) -> None:
    runs = {"synchronous": trained(after=0.69), "april": trained()}
    rows = [{"variant": name, **training_metrics(run, 0.25)} for name, run in runs.items()]
    rows.insert(1, {"variant": "outside", **training_metrics(None)})
    console = Console(record=True, width=80)
    show_training(rows, SETTINGS, console)
    text = console.export_text()
    assert "0.500 → 0.800 +0.300 0.100" in text
    assert "…" not in text, "80 columns are enough"
    assert "other processes used 25% of the cores during the training" in text
    assert "outside" not in text
    assert text.count("not above two standard errors") == 1
    draw_learning(tmp_path / "learning.png", runs)
    assert (tmp_path / "learning.png").stat().st_size > 1000


@pytest.mark.parametrize(("variant", "pool", "bound"), [("synchronous", 4, 0), ("april", 8, 5)])
def test_the_two_runs_differ_in_partial_rollout_alone(variant: str, pool: int, bound: int, tmp_path: Path) -> None:
    data = prepare(SETTINGS, tmp_path)
    made = configuration(variant, "http://there", SETTINGS, data, tmp_path, on_gpu=False)
    check(made)
    assert (made.pool_size, made.staleness_bound) == (pool, bound)
    assert (made.rollout_batch_size, made.n_samples_per_prompt, made.num_rollout) == (4, 2, 2)
    assert len(read_rows(made.prompt_data)) == 2 * 4 + 8, "no prompt comes twice"
    assert len(read_rows(str(made.eval_prompt_data))) == 5


@pytest.mark.parametrize(("variant", "pool", "bound"), [("synchronous", 8, 0), ("april", 16, 5)])
def test_the_two_runs_of_agents(variant: str, pool: int, bound: int, tmp_path: Path) -> None:
    settings = Settings(training=AGENT_TRAINING, agent=True)
    made = configuration(variant, "http://there", settings, prepare(settings, tmp_path), tmp_path, on_gpu=False)
    check(made)
    assert (made.agent, made.pool_size, made.staleness_bound) == ("examples.agent.calculator:agent", pool, bound)
    assert Path(made.hf_checkpoint) == settings.model == CHECKPOINTS / "calculator"
    rows = read_rows(made.prompt_data)
    assert len(rows) == 12 * 8 + 16
    assert all(3 <= len(row["input"].split()) <= 8 for row in rows)


def test_figures_of_trajectories_have_turns() -> None:
    steps = [step(turns=[1, 3]), step(turns=[8, 4])]
    inner = training_metrics(Trained(steps, trained().evaluations))["training"]
    assert (inner["turns_mean"], inner["turns_max"]) == (4, 8)


def test_prompts_and_their_reward_through_the_bridge(tmp_path: Path) -> None:
    stream = problems(3)
    given = [next(stream) for _ in range(2)]
    made = configuration("april", "http://there", SETTINGS, {"prompt_data": Path("none")}, tmp_path, on_gpu=False)
    first, second = PromptData(read_rows(write_prompts(tmp_path / "new" / "p.jsonl", given)), made).take(2)
    assert first.content == given[0].prompt
    assert first.content[-1] == SORT
    reported = [RewardSample("", ids, {}, 0) for ids in (given[1].answer, given[1].answer[:3])]
    assert reward(reported[0], second) == 1.0
    assert reward(reported[1], second) == 3 / len(given[1].answer)


def test_warm_up_demonstrations_give_up() -> None:
    answers = torch.arange(10, 60).repeat(200, 1)
    shown = give_up(answers, random.Random(0), 0.5)
    early = [row for row in shown.tolist() if EOS in row]
    assert 70 < len(early) < 130
    for row in early:
        at = row.index(EOS)
        assert row[:at] == list(range(10, 10 + at))
        assert set(row[at + 1 :]) == {IGNORED}
    assert answers.min() == 10, "the answers themselves stay"


ROW = {
    "variant": "april",
    **dict.fromkeys(("delivered_tokens_per_s", "off_policy_share", "mean_running"), 1.0),
    **dict.fromkeys(("tokens_after_end", "reprefilled_tokens", "samples_lost"), 0),
}


def test_a_failed_part_names_the_reason_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the engine [at home] is gone")

    monkeypatch.setattr(demo, "import_trainer", lambda: None)
    monkeypatch.setattr(demo, "run_rounds", lambda *_: ([ROW | training_metrics(None)], 1.0))
    monkeypatch.setattr(demo, "run_training", fails)
    monkeypatch.setattr("sys.argv", ["demo", "--server", "http://there", "--out", str(tmp_path), "--steps", "2"])
    assert demo.main() == 1
    assert "training failed: the engine [at home] is gone" in capsys.readouterr().out
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [row["variant"] for row in rows] == ["april"]
    assert rows[0]["reward_after"] is None
    monkeypatch.setattr("sys.argv", ["demo", "--server", "http://there", "--out", str(tmp_path), "--steps", "0"])
    assert demo.main() == 0, "without steps nothing is trained"


def test_busy_machine_is_named() -> None:
    assert demo.busy_warning(5.0) == ""
    assert "other processes used 73 % of the cores" in demo.busy_warning(73.2)


def test_next_steps_exist(tmp_path: Path) -> None:
    root = Path(demo.__file__).parents[2]
    output = demo.next_steps(tmp_path, trained=True)
    assert f"april-train report {tmp_path / 'training' / 'april'}" in output
    assert "april-train" not in demo.next_steps(tmp_path, trained=False)
    assert (root / "docs" / "quickstart.md").exists()
    assert "bench:" in (root / "Makefile").read_text()
    words = re.search(r"make bench BENCH_ARGS='(.*?)'", output)
    assert words
    given, default = bench_arguments(shlex.split(words[1])), bench_arguments([])
    assert "an hour by default" in output
    assert (given.budget_minutes, default.budget_minutes) == (10, 60)
    assert not given.out.is_absolute()
    assert subprocess.run(["git", "check-ignore", "--quiet", str(given.out)], cwd=root, check=False).returncode == 0
