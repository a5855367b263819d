"""Rounds of the rollout driver against a fake engine: prompts sent, groups judged, replaced and carried."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_april.client import AprilError
from sglang_april.client.types import RolloutGroup, RolloutSample, RolloutSummary, Span
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.prompt_pool import PromptPool
from trainer_bridge.rewards import RewardSample, Score
from trainer_bridge.rollout import RolloutDriver
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.samples import training_samples
from trainer_bridge.validate import RunError

STATS = {"duration_s": 1.0, "tokens_after_quota": 0, "reprefilled_tokens": 0, "over_bound": 0, "timeline": []}


class FakeRolloutEngine:
    """Finishes groups in order of arrival. A round ends at its quota and can be repeated."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.verdicts: dict[str, bool] = {}
        self.quota = 0
        self.open = False
        self.lock = threading.Lock()
        self.dies_after: int | None = None
        self.refusals: list[Exception] = []
        """Errors with which the next verdicts are refused."""
        self.judged = 0
        self.gone = False

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        self.bodies.append(body)
        self.waiting += body["prompts"]
        self.quota, self.open = body["quota"] or 10**6, True
        delivered: list[dict[str, Any]] = []
        count = 0
        while self._continues(count):
            if self.dies_after is not None and len(delivered) == self.dies_after:
                raise ConnectionError("the engine died")
            prompt = self.waiting.pop(0)
            yield finished_group(prompt)
            accepted = None
            if body["count"] == "accepted":
                accepted = self._verdict(prompt["id"])
            count += accepted is not False
            delivered.append({"id": prompt["id"], "incarnation": 0, "indices": list(range(prompt["n"]))})
            delivered[-1] |= {"complete": True, "accepted": accepted}
        reason: Any = "quota" if count >= self.quota else "exhausted"
        yield RolloutSummary(body["round_id"], body["run"], 1, reason, delivered, {"groups": len(self.waiting)}, STATS)

    def _continues(self, count: int) -> bool:
        with self.lock:
            self.open = bool(self.waiting) and count < self.quota
            return self.open

    def _verdict(self, prompt_id: str) -> bool:
        """Wait for the verdict, as the real engine does for the last one."""
        while prompt_id not in self.verdicts:
            if self.gone:
                raise ConnectionError("the engine is gone")
            time.sleep(0.001)
        return self.verdicts[prompt_id]

    def judge(self, round_id: str, accept: list[str], reject: list[str]) -> None:
        self.judged += 1
        if self.refusals:
            raise self.refusals.pop(0)
        self.verdicts |= dict.fromkeys(accept, True) | dict.fromkeys(reject, False)

    def extend(self, round_id: str, quota_add: int, prompts: list[dict[str, Any]]) -> None:
        with self.lock:
            if not self.open:
                raise AprilError(409, "round_id", "has ended")
            self.quota += quota_add
            self.waiting += prompts


class SampleEngine:
    """Delivers one sample of its first prompt per round, as `quota_unit: sample` permits."""

    def __init__(self) -> None:
        self.prompts: list[dict[str, Any]] = []
        self.delivered = 0

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        self.prompts += body["prompts"]
        whole, index = finished_group(self.prompts[0]), self.delivered
        self.delivered += 1
        last = self.delivered == len(whole.samples)
        yield replace(whole, samples=[whole.samples[index]], complete=last)
        part = {"id": whole.id, "incarnation": 0, "indices": [index], "complete": last, "accepted": None}
        yield RolloutSummary(body["round_id"], body["run"], 1, "quota", [part], {"groups": 1}, STATS)


def finished_group(prompt: dict[str, Any]) -> RolloutGroup:
    ids = np.array([7, 8], dtype=np.int32)
    samples = [
        RolloutSample(i, ids, "", {"type": "stop"}, 0, np.zeros(2, np.float32), "processed", [Span(0, 2, 1, "fresh")])
        for i in range(prompt["n"])
    ]
    return RolloutGroup(prompt["id"], 0, None, ids, True, None, samples)


class FakeRewards:
    """Rewards by the prompt's label: `ok` differ, `equal` are equal, `none` fail, one of `half` fails."""

    def submit(self, samples: list[RewardSample], prompt: Any) -> "Future[list[Score]]":
        done: Future[list[Score]] = Future()
        rewards = {"ok": [0.0, 1.0], "equal": [1.0, 1.0], "none": [None, None], "half": [1.0, None]}[prompt.label]
        of_samples = [rewards[sample.index] for sample in samples]
        done.set_result([Score(reward, "" if reward is not None else "broken") for reward in of_samples])
        return done


@pytest.fixture
def engine() -> FakeRolloutEngine:
    return FakeRolloutEngine()


def rollout_driver(
    engine: FakeRolloutEngine | SampleEngine, folder: Path, labels: list[str], **fields: Any
) -> RolloutDriver:
    config = Config(hf_checkpoint="m", prompt_data="d", rollout_batch_size=2, n_samples_per_prompt=2, **fields)
    data = PromptData([{"input": f"q{i}", "label": label} for i, label in enumerate(labels)], config)
    return RolloutDriver(engine, "run", PromptPool(data), FakeRewards(), config, Checkpoints(folder, 1))  # type: ignore[arg-type]


def group_ids(rollout: ScoredRollout) -> list[str]:
    return [scored.group.id for scored in rollout.groups]


def sent_prompts(engine: FakeRolloutEngine) -> list[list[str]]:
    return [[prompt["id"] for prompt in body["prompts"]] for body in engine.bodies]


def test_pool_is_filled_and_no_prompt_is_sent_twice(engine: FakeRolloutEngine, tmp_path: Path) -> None:
    driver = rollout_driver(engine, tmp_path, ["ok"] * 20, over_sampling_batch_size=5)
    assert group_ids(driver.round("r.1", 2)) == ["e0-0", "e0-1"]
    assert group_ids(driver.round("r.2", 2)) == ["e0-2", "e0-3"]
    assert sent_prompts(engine) == [["e0-0", "e0-1", "e0-2", "e0-3", "e0-4"], ["e0-5", "e0-6"]]
    assert list(driver.pool.prompts) == ["e0-4", "e0-5", "e0-6"]


def test_failed_round_leaves_the_pool_unchanged_and_is_repeated_identically(
    engine: FakeRolloutEngine, tmp_path: Path
) -> None:
    driver = rollout_driver(engine, tmp_path, ["ok"] * 20, over_sampling_batch_size=4)
    driver.round("r.1", 2)
    before = list(driver.pool.prompts)
    engine.dies_after = 1
    with pytest.raises(ConnectionError):
        driver.round("r.2", 2)
    assert list(driver.pool.prompts) == before
    engine.dies_after = None
    driver.round("r.2", 2)
    assert engine.bodies[1] == engine.bodies[2]


def test_new_engine_gets_all_prompts_of_the_pool(engine: FakeRolloutEngine, tmp_path: Path) -> None:
    driver = rollout_driver(engine, tmp_path, ["ok"] * 20, over_sampling_batch_size=4)
    driver.round("r.1", 2)
    driver.engines_with_carry, engine.waiting = set(), []
    driver.round("r.2", 2)
    assert sent_prompts(engine)[1] == ["e0-2", "e0-3", "e0-4", "e0-5"]


def test_pool_is_restored_from_a_checkpoint(engine: FakeRolloutEngine, tmp_path: Path) -> None:
    first = rollout_driver(engine, tmp_path, ["ok"] * 20)
    first.round("r.1", 2)
    again = rollout_driver(engine, tmp_path, ["ok"] * 20)
    again.pool.restore(list(first.pool.prompts))
    assert again.pool.prompts == first.pool.prompts


def test_groups_with_equal_rewards_are_rejected_and_replaced(engine: FakeRolloutEngine, tmp_path: Path) -> None:
    labels = ["equal", "ok", "none", "ok", *["ok"] * 8]
    driver = rollout_driver(engine, tmp_path, labels, over_sampling_batch_size=2, dynamic_sampling=True)
    rollout = driver.round("r.1", 2)
    assert engine.bodies[0]["count"] == "accepted"
    assert group_ids(rollout) == ["e0-1", "e0-3"]
    assert (rollout.rejected, rollout.unscored, rollout.replaced) == (2, 0, 2)
    assert engine.verdicts == {"e0-0": False, "e0-1": True, "e0-2": False, "e0-3": True}


def test_group_with_fewer_than_two_rewards_is_excluded_and_counted(engine: FakeRolloutEngine, tmp_path: Path) -> None:
    driver = rollout_driver(engine, tmp_path, ["half", *["ok"] * 9], over_sampling_batch_size=4)
    rollout = driver.round("r.1", 2)
    assert rollout.unscored == 1
    assert rollout.problems == ["broken"]
    assert "e0-0" not in group_ids(rollout)
    assert len(rollout.groups) == 1 + rollout.replaced


@pytest.mark.parametrize(("label", "message"), [("none", "broken"), ("equal", "all its rewards are equal")])
def test_reward_that_always_fails_or_is_the_same_ends_the_run(
    engine: FakeRolloutEngine, tmp_path: Path, label: str, message: str
) -> None:
    """After ten times the quota of 2. Otherwise each unusable group would extend the round for ever."""
    labels = [label] * 40 + ["ok"] * 9
    driver = rollout_driver(engine, tmp_path, labels, over_sampling_batch_size=2, dynamic_sampling=True)
    with pytest.raises(RunError, match=f"^21 groups of one round cannot be trained on. The last one: {message}$"):
        driver.round("r.1", 2)
    assert not driver.pool.prompts


def test_reward_that_often_fails_does_not_end_the_run(engine: FakeRolloutEngine, tmp_path: Path) -> None:
    labels = ["none"] * 20 + ["ok"] * 9
    driver = rollout_driver(engine, tmp_path, labels, over_sampling_batch_size=2, dynamic_sampling=True)
    assert len(driver.round("r.1", 2).groups) == 2


@pytest.mark.parametrize(("label", "masked"), [("ok", False), ("half", True)])
def test_last_sample_of_a_group_is_trained_on_alone(tmp_path: Path, label: str, masked: bool) -> None:
    """With `quota_unit: sample` the rounds before may have delivered the others."""
    fields = {"quota_unit": "sample", "loss": LossSettings(algorithm="reinforce"), "over_sampling_batch_size": 2}
    driver = rollout_driver(SampleEngine(), tmp_path, [label] * 9, **fields)
    driver.round("r.1", 1)
    last = driver.round("r.2", 1)
    assert [(sample.index, sample.masked) for sample in training_samples(last.groups, driver._config)] == [(1, masked)]
    assert last.unscored == 0
    assert "e0-0" not in driver.pool.prompts


def test_extensions_are_stored_before_they_are_sent(engine: FakeRolloutEngine, tmp_path: Path) -> None:
    """After a crash in between, the engine has a prompt that is not in the checkpoint, but in the note."""
    labels = ["equal", "ok", "ok", "ok", "ok", "ok"]
    driver = rollout_driver(engine, tmp_path, labels, over_sampling_batch_size=2, dynamic_sampling=True)
    driver.round("r.1", 2)
    assert Checkpoints(tmp_path, 1).extended("r.1") == ["e0-2"]
    again = rollout_driver(engine, tmp_path, labels, over_sampling_batch_size=2, dynamic_sampling=True)
    again.engines_with_carry = {0}
    again.round("r.1", 2)
    (unsent,) = again.pool.draw(1)
    assert unsent.id not in ("e0-0", "e0-1", "e0-2"), "the prompt of the extension is not drawn again"
