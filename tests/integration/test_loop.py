"""Training runs end to end on the shared server: Megatron on the CPU trains on the engine's samples."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bridge import REWARDS, configuration, sample_keys, train, training, write_prompts
from tests.support.live import LiveServer
from tests.support.server import ROOT, START_LIMIT_S
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.progress import read_rows
from trainer_bridge.report import write_report

Model = Callable[[str, int], Path]


@pytest.fixture
def config(normal: LiveServer, models: Model, tmp_path: Path) -> Callable[..., Any]:
    def make(name: str = "one", **fields: Any) -> Any:
        return configuration(tmp_path / name, normal.server.url, models("qwen3", 0), **fields)

    return make


def test_three_steps_and_the_drain(normal: LiveServer, config: Callable[..., Any], tmp_path: Path) -> None:
    """Every group is delivered once, trainer and engine logprobs agree, and the report is plotted."""
    before = normal.server.state()["policy_version"]
    made = config(num_rollout=3, eval_interval=2, eval_prompt_data=str(write_prompts(tmp_path / "held.jsonl", 6, 1)))
    state, loop, rows = train(made)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["drain"] for row in rows] == [False, False, False, True]
    assert [row["groups"] for row in rows[:3]] == [4, 4, 4]
    assert normal.server.state()["policy_version"] == before + 1 + state.step
    samples = Counter(key for part in loop.trained for key in sample_keys(part))
    assert set(samples.values()) == {1}
    assert len({prompt for prompt, _ in samples}) * 4 == len(samples)
    for report in loop.reports:
        row = report.stats.row()
        assert report.applied
        assert row["on_policy_gap"] < 1e-4, "trainer and engine agree on fresh tokens"
    assert rows[1]["off_policy_share"] > 0, "partials were trained on"
    assert normal.server.state()["runs"][loop.run_name]["groups"] == 0
    held = read_rows(Path(made.save) / "evaluations.jsonl")
    assert [row["step"] for row in held] == [0, 2, 3, 4]
    assert all(row["prompts"] == 6 for row in held)
    page = write_report(Path(made.save), tmp_path / "report.html").read_text()
    assert page.count("<img") == 7
    assert Checkpoints(Path(made.save), 2).steps() == [3, 4]
    assert any((Path(made.save) / "events").iterdir())


def test_strict_on_policy_matches_synchronous_sampling(config: Callable[..., Any]) -> None:
    """Samples equal those of a round that waits for all, and the first ratio is 1."""
    drawn = []
    for name, fields in (("strict", {"strict_on_policy": True}), ("waiting", {"partial_rollout": False})):
        _, loop, rows = train(config(name, num_rollout=2, over_sampling_batch_size=4, lr=1e-5, **fields))
        assert [row["off_policy_share"] for row in rows] == [0.0, 0.0]
        assert [row["hybrid_share"] for row in rows] == [0.0, 0.0]
        assert all(abs(r.stats.row()["ratio_max"] - 1) < 1e-4 for r in loop.reports)
        drawn.append([{(r.prompt_id, r.index): r.output_ids.tolist() for r in part} for part in loop.trained])
    assert drawn[0] == drawn[1]
    assert len(drawn[0][0]) == 16


def test_evaluation_changes_no_training_sample(config: Callable[..., Any], tmp_path: Path) -> None:
    held = str(write_prompts(tmp_path / "held.jsonl", 6, 1))
    drawn = []
    for name, fields in (("without", {}), ("with", {"eval_interval": 1, "eval_prompt_data": held})):
        # The learning rate changes nothing: the test compares sampling, not the trainer's arithmetic.
        _, loop, _ = train(config(name, num_rollout=2, lr=1e-12, partial_rollout=False, **fields))
        drawn.append([{(r.prompt_id, r.index): r.output_ids.tolist() for r in part} for part in loop.trained])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"advantage_estimator": "grpo", "push": "distributed"},
        {"advantage_estimator": "dapo", "overlong_buffer_len": 8},
        {"advantage_estimator": "gspo", "proximal": "trainer", "correction": "seq_mask"},
        {"advantage_estimator": "reinforce", "quota_unit": "sample"},
        {"advantage_estimator": "ppo", "proximal": "loglinear", "correction": "decoupled"},
        {"correction": "tis", "proximal": "engine", "kv": "recompute", "global_batch_size": 8},
        {"correction": "icepop", "proximal": "trainer", "rollout_temperature": 0.8},
        {"correction": "mask_stale", "push": "disk", "colocate": True, "offload_trainer": True},
    ],
    ids=lambda fields: "-".join(str(value) for value in fields.values()),
)
def test_each_algorithm_and_correction_takes_steps(config: Callable[..., Any], fields: dict[str, Any]) -> None:
    _, loop, rows = train(config(num_rollout=2, on_end="drop", **fields))
    assert len(rows) == 2
    reported = [(report.applied, np.isfinite(report.loss), report.stats.row()) for report in loop.reports]
    assert all(applied and finite for applied, finite, _ in reported), reported
    if "global_batch_size" in fields:
        assert len(loop.reports) == 4
    else:
        assert all(report.stats.row()["on_policy_gap"] < 1e-4 for report in loop.reports)
    if fields.get("colocate"):
        parts = ("release", "onload", "offload", "weights", "kv")
        assert {f"colocate_{part}" for part in parts} <= rows[0]["seconds"].keys()
        assert rows[0]["seconds"]["colocate_offload"] > 0


def test_dynamic_sampling_rejects_groups_without_variance(config: Callable[..., Any]) -> None:
    """Two of five groups have equal rewards: they are rejected, and other groups meet the quota."""
    reward = f"{REWARDS}:constant_for_some"
    made = config(num_rollout=3, reward=reward, dynamic_sampling=True, advantage_estimator="dapo", on_end="drop")
    _, loop, rows = train(made)
    assert [row["groups"] for row in rows] == [4, 4, 4]
    assert sum(row["rejected"] for row in rows) > 0
    trained = {prompt for part in loop.trained for prompt, _ in sample_keys(part)}
    assert all(int(prompt.split("-")[1]) % 5 >= 2 for prompt in trained)


def test_groups_without_rewards_are_replaced(config: Callable[..., Any]) -> None:
    _, loop, rows = train(config(num_rollout=2, reward=f"{REWARDS}:fails_for_some", on_end="drop"))
    assert [row["groups"] for row in rows] == [4, 4]
    assert sum(row["unscored"] for row in rows) > 0
    assert not any(response.masked for part in loop.trained for response in part)
    assert any("unreadable" in problem for row in rows for problem in row["problems"])


def test_two_engines_deliver_one_quota(normal: LiveServer, second: LiveServer, config: Callable[..., Any]) -> None:
    """Both engines take part in every round and push, and each finishes its own partials."""
    urls = [normal.server.url, second.server.url]
    made = config(num_rollout=3, server=urls, push="distributed", reward=f"{REWARDS}:fails_for_some")
    state, loop, rows = train(made)
    assert [row["groups"] for row in rows[:3]] == [4, 4, 4]
    samples = Counter(key for part in loop.trained for key in sample_keys(part))
    assert set(samples.values()) == {1}
    assert len({prompt for prompt, _ in samples}) * 4 == len(samples) == state.samples
    assert all(report.stats.row()["on_policy_gap"] < 1e-4 for report in loop.reports)
    assert sum(row["off_policy_share"] for row in rows) > 0
    for live in (normal, second):
        reported = live.server.state()
        assert reported["policy_version"] == rows[-1]["version"] + 1
        assert reported["runs"][loop.run_name]["groups"] == 0
        assert not reported["http"]["rounds"]


def test_two_engines_draw_the_same_samples_as_one_strictly_on_policy(
    normal: LiveServer, second: LiveServer, config: Callable[..., Any]
) -> None:
    """All prompts start and finish; the engine that draws a sample does not affect its tokens."""
    drawn = []
    for name, server in (("one", normal.server.url), ("two", [normal.server.url, second.server.url])):
        made = config(name, num_rollout=2, over_sampling_batch_size=4, lr=1e-5, strict_on_policy=True, server=server)
        _, loop, rows = train(made)
        assert [row["off_policy_share"] for row in rows] == [0.0, 0.0]
        drawn.append([{(r.prompt_id, r.index): r.output_ids.tolist() for r in part} for part in loop.trained])
    assert drawn[0] == drawn[1]
    assert [len(part) for part in drawn[1]] == [16, 16]


def kill_after(config: Any, step: int) -> None:
    """Start a trainer process and kill −9 it after some steps."""
    folder = Path(config.save).parent
    (folder / "config.yaml").write_text(config.as_yaml())
    with (folder / "log").open("wb") as log:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "trainer_bridge", "--config", str(folder / "config.yaml")],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_LIMIT_S
    try:
        while len(read_rows(Path(config.save) / "steps.jsonl")) < step:
            assert trainer.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()


def test_run_survives_a_killed_trainer(normal: LiveServer, config: Callable[..., Any]) -> None:
    """kill −9 during ten steps: no sample is lost or trained on twice."""
    made = config(num_rollout=10)
    kill_after(made, 4)
    with training(made) as loop:
        assert loop.run().step >= 10
        name = loop.run_name
    done = read_rows(Path(made.save) / "steps.jsonl")
    assert [row["step"] for row in done] == list(range(1, len(done) + 1))
    assert [row["groups"] for row in done[:10]] == [4] * 10
    delivered = [tuple(sample) for row in done for sample in row["delivered"]]
    assert len(delivered) == len(set(delivered)) == done[-1]["samples_so_far"]
    assert normal.server.state()["runs"][name]["groups"] == 0
