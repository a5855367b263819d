"""Rounds from the trainer's side, against an engine of a few lines: what is handed over, judged, replaced and kept."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_april.client import AprilError
from sglang_april.client.types import RolloutGroup, RolloutSample, RolloutSummary, Span
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.rewards import RewardSample, Score
from trainer_bridge.rollout import RolloutDriver, ScoredRollout

STATS = {"duration_s": 1.0, "tokens_after_quota": 0, "reprefilled_tokens": 0, "over_bound": 0, "timeline": []}


class FakeEngine:
    """Finishes groups in the order of their arrival; a round ends at its quota, and may be asked for again."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.verdicts: dict[str, bool] = {}
        self.quota = 0
        self.open = False
        self.lock = threading.Lock()
        self.dies_after: int | None = None
        self.refusals: list[Exception] = []
        """What the next verdicts are answered with, instead of being heard."""
        self.judged = 0
        self.gone = False

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        self.bodies.append(body)
        self.waiting += body["prompts"]
        self.quota, self.open = body["quota"] or 10**6, True
        delivered: list[dict[str, Any]] = []
        count = 0
        while self._goes_on(count):
            if self.dies_after is not None and len(delivered) == self.dies_after:
                raise ConnectionError("the engine died")
            prompt = self.waiting.pop(0)
            yield finished(prompt)
            accepted = None
            if body["count"] == "accepted":
                accepted = self._verdict(prompt["id"])
            count += accepted is not False
            delivered.append({"id": prompt["id"], "incarnation": 0, "indices": list(range(prompt["n"]))})
            delivered[-1] |= {"complete": True, "accepted": accepted}
        reason: Any = "quota" if count >= self.quota else "exhausted"
        yield RolloutSummary(body["round_id"], body["run"], 1, reason, delivered, {"groups": len(self.waiting)}, STATS)

    def _goes_on(self, count: int) -> bool:
        with self.lock:
            self.open = bool(self.waiting) and count < self.quota
            return self.open

    def _verdict(self, prompt_id: str) -> bool:
        """The real engine waits for the last verdict; so does this one, which gives its caller's threads a chance."""
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


def finished(prompt: dict[str, Any]) -> RolloutGroup:
    ids = np.array([7, 8], dtype=np.int32)
    samples = [
        RolloutSample(i, ids, "", {"type": "stop"}, 0, np.zeros(2, np.float32), "processed", [Span(0, 2, 1, "fresh")])
        for i in range(prompt["n"])
    ]
    return RolloutGroup(prompt["id"], 0, None, ids, True, None, samples)


class FakeRewards:
    """Rewards by the prompt's label: `ok` differ, `equal` do not, `none` fail."""

    def submit(self, samples: list[RewardSample], prompt: Any) -> "Future[list[Score]]":
        done: Future[list[Score]] = Future()
        told = {"ok": [0.0, 1.0], "equal": [1.0, 1.0], "none": [None, None], "half": [1.0, None]}[prompt.label]
        done.set_result([Score(reward, "" if reward is not None else "broken") for reward in told])
        return done


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def rollouts(engine: FakeEngine, folder: Path, labels: list[str], **fields: Any) -> RolloutDriver:
    config = Config(hf_checkpoint="m", prompt_data="d", rollout_batch_size=2, n_samples_per_prompt=2, **fields)
    data = PromptData([{"input": f"q{i}", "label": label} for i, label in enumerate(labels)], config)
    made: Any = RolloutDriver(engine, "run", data, FakeRewards(), config, Checkpoints(folder, 1))  # type: ignore[arg-type]
    return made


def ids(made: ScoredRollout) -> list[str]:
    return [scored.group.id for scored in made.groups]


def handed(engine: FakeEngine) -> list[list[str]]:
    return [[prompt["id"] for prompt in body["prompts"]] for body in engine.bodies]


def test_the_pool_is_filled_up_and_nothing_is_handed_over_twice(engine: FakeEngine, tmp_path: Path) -> None:
    made = rollouts(engine, tmp_path, ["ok"] * 20, over_sampling_batch_size=5)
    assert ids(made.round("r.1", 2)) == ["e0-0", "e0-1"]
    assert ids(made.round("r.2", 2)) == ["e0-2", "e0-3"]
    assert handed(engine) == [["e0-0", "e0-1", "e0-2", "e0-3", "e0-4"], ["e0-5", "e0-6"]]
    assert list(made.pending) == ["e0-4", "e0-5", "e0-6"]


def test_a_round_that_failed_changed_nothing_and_is_asked_for_alike(engine: FakeEngine, tmp_path: Path) -> None:
    made = rollouts(engine, tmp_path, ["ok"] * 20, over_sampling_batch_size=4)
    made.round("r.1", 2)
    before = list(made.pending)
    engine.dies_after = 1
    with pytest.raises(ConnectionError):
        made.round("r.2", 2)
    assert list(made.pending) == before
    engine.dies_after = None
    made.round("r.2", 2)
    assert engine.bodies[1] == engine.bodies[2]


def test_a_new_engine_gets_all_that_is_pending(engine: FakeEngine, tmp_path: Path) -> None:
    made = rollouts(engine, tmp_path, ["ok"] * 20, over_sampling_batch_size=4)
    made.round("r.1", 2)
    made.held, engine.waiting = set(), []
    made.round("r.2", 2)
    assert handed(engine)[1] == ["e0-2", "e0-3", "e0-4", "e0-5"]


def test_what_a_checkpoint_says_is_pending_comes_back(engine: FakeEngine, tmp_path: Path) -> None:
    first = rollouts(engine, tmp_path, ["ok"] * 20)
    first.round("r.1", 2)
    again = rollouts(engine, tmp_path, ["ok"] * 20)
    again.restore(list(first.pending))
    assert again.pending == first.pending


def test_groups_without_variance_are_rejected_and_replaced(engine: FakeEngine, tmp_path: Path) -> None:
    labels = ["equal", "ok", "none", "ok", *["ok"] * 8]
    made = rollouts(engine, tmp_path, labels, over_sampling_batch_size=2, dynamic_sampling=True)
    done = made.round("r.1", 2)
    assert engine.bodies[0]["count"] == "accepted"
    assert ids(done) == ["e0-1", "e0-3"]
    assert (done.rejected, done.unscored, done.replaced) == (2, 0, 2)
    assert engine.verdicts == {"e0-0": False, "e0-1": True, "e0-2": False, "e0-3": True}


def test_a_group_without_two_rewards_is_left_out_and_counted(engine: FakeEngine, tmp_path: Path) -> None:
    made = rollouts(engine, tmp_path, ["half", *["ok"] * 9], over_sampling_batch_size=4)
    done = made.round("r.1", 2)
    assert done.unscored == 1
    assert done.problems == ["broken"]
    assert "e0-0" not in ids(done)
    assert len(done.groups) == 1 + done.replaced


def test_extensions_are_noted_before_they_are_sent(engine: FakeEngine, tmp_path: Path) -> None:
    """A death in between: the engine has the prompt, the checkpoint does not know; the note does."""
    labels = ["equal", "ok", "ok", "ok", "ok", "ok"]
    made = rollouts(engine, tmp_path, labels, over_sampling_batch_size=2, dynamic_sampling=True)
    made.round("r.1", 2)
    assert Checkpoints(tmp_path, 1).extended("r.1") == ["e0-2"]
    again = rollouts(engine, tmp_path, labels, over_sampling_batch_size=2, dynamic_sampling=True)
    again.held = {0}
    again.round("r.1", 2)
    assert again._data.position >= 3, "the prompt of the extension is not handed over once more"
