"""Rollouts over several engines: prompts, replacements and settings."""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_april.client.engine_pool import EnginePool
from tests.bridge.fake_engine_pool import FakePoolEngine
from tests.bridge.test_rollout import FakeRewards
from tests.support.live import until
from trainer_bridge.args import config_parser, load
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.data import PromptData
from trainer_bridge.prompt_pool import PromptPool
from trainer_bridge.rollout import RolloutDriver
from trainer_bridge.rollout_collector import RolloutCollector, ScoredRollout
from trainer_bridge.validate import check

BASE = {"hf_checkpoint": "m", "prompt_data": "d", "rollout_batch_size": 4, "n_samples_per_prompt": 2}


def rollout_driver(
    engines: list[FakePoolEngine], folder: Path, labels: Sequence[str] = ("ok",) * 400, **fields: Any
) -> RolloutDriver:
    config = Config.from_fields({**BASE, **fields})
    data = PromptData([{"input": f"q{i}", "label": label} for i, label in enumerate(labels)], config)
    client: Any = EnginePool(engines)  # type: ignore[arg-type]
    rewards: Any = FakeRewards()
    pool = PromptPool(data, len(engines))
    return RolloutDriver(client, "run", pool, rewards, config, Checkpoints(folder, 1))


def collector_of(driver: RolloutDriver, round_id: str) -> RolloutCollector:
    """The collector of a round, before the round."""
    parts: Any = (driver.client, driver.pool, driver.rewards, driver._store, driver._config)
    return RolloutCollector(*parts, round_id, 4, [])


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_prompt_is_delivered_once_over_many_rounds(tmp_path: Path, dynamic: bool) -> None:
    """Unusable groups are replaced, the speeds of the engines vary, and every prompt sent is delivered exactly once."""
    engines, rng = [FakePoolEngine(), FakePoolEngine(), FakePoolEngine()], random.Random(1)
    kinds = random.Random(0).choices(("ok", "ok", "equal", "half"), k=400)
    driver = rollout_driver(engines, tmp_path, kinds, over_sampling_batch_size=12, dynamic_sampling=dynamic)
    trained: Counter[str] = Counter()
    for number in range(30):
        slow = rng.randrange(4)
        for i, engine in enumerate(engines):
            engine.may_finish = rng.randrange(2) if i == slow else 10**6
        rollout: ScoredRollout = driver.round(f"run.{number}", 4)
        accepted = len(rollout.groups) + (0 if dynamic else rollout.unscored - rollout.replaced)
        assert accepted == 4
        trained.update(scored.group.id for scored in rollout.groups)
        loads = Counter(driver.pool.engine_of.values())
        assert set(driver.pool.engine_of) == set(driver.pool.prompts)
        assert sum(loads.values()) == sum(len(e.waiting) + len(e.finished) for e in engines)
    for engine in engines:
        engine.may_finish = 10**6
    trained.update(scored.group.id for scored in driver.round("run.30", None).groups)
    assert set(trained.values()) == {1}
    assert not driver.pool.prompts
    delivered = Counter(name for engine in engines for name in engine.delivered)
    assert set(delivered.values()) == {1}
    assert len(delivered) == driver.pool.position


def test_prompts_go_to_the_least_loaded_engine_and_a_new_engine_gets_the_lost_ones(tmp_path: Path) -> None:
    engines = [FakePoolEngine(), FakePoolEngine()]
    engines[0].may_finish = 0
    driver = rollout_driver(engines, tmp_path, over_sampling_batch_size=12)
    driver.round("run.1", 2)
    left = Counter(driver.pool.engine_of.values())
    driver.round("run.2", 2)
    sent = [len(engine.bodies[1]["prompts"]) for engine in engines]
    assert left[0] + sent[0] == left[1] + sent[1] == 6
    lost = [name for name, engine in driver.pool.engine_of.items() if engine == 1]
    engines[1] = driver.client.clients[1] = FakePoolEngine()  # type: ignore[union-attr,index,call-overload]
    driver.engines_with_carry = {0}
    driver.round("run.3", 2)
    assert {prompt["id"] for prompt in engines[1].bodies[0]["prompts"]} >= set(lost)
    assert not {prompt["id"] for prompt in engines[0].bodies[2]["prompts"]} & set(lost)


def test_a_round_that_was_interrupted_twice_sends_each_engine_what_it_sent_before(tmp_path: Path) -> None:
    """Engine 1 had no carry at the first attempt, and engine 0 has lost its carry before the third."""
    first = rollout_driver([FakePoolEngine(), FakePoolEngine()], tmp_path, over_sampling_batch_size=12)
    first.round("run.1", 4)
    carried = [{name for name, at in first.pool.engine_of.items() if at == engine} for engine in (0, 1)]
    shares: list[list[list[str]]] = []
    for with_carry in ({0}, {0, 1}, {1}, {0, 1}):
        engines = [FakePoolEngine(), FakePoolEngine()]
        again = rollout_driver(engines, tmp_path, over_sampling_batch_size=12)
        again.pool.restore(list(first.pool.prompts), list(first.pool.engine_of.values()))
        again.pool._data.position = first.pool.position
        again.engines_with_carry = with_carry
        again.round("run.2", 4)
        shares.append([[prompt["id"] for prompt in engine.bodies[0]["prompts"]] for engine in engines])
    assert [one[1] for one in shares] == [shares[0][1]] * 4
    assert carried[1] <= set(shares[0][1])
    assert [one[0] for one in shares] == [shares[0][0]] * 2 + [shares[2][0]] * 2
    assert not carried[0] & set(shares[0][0])
    assert carried[0] <= set(shares[2][0])


@pytest.mark.parametrize("fewer", [1, 2])
def test_with_fewer_engines_the_prompts_of_the_removed_ones_are_sent_once_to_the_others(
    tmp_path: Path, fewer: int
) -> None:
    engines = [FakePoolEngine() for _ in range(3)]
    first = rollout_driver(engines, tmp_path, over_sampling_batch_size=12)
    first.round("run.1", 4)
    again = rollout_driver(engines[:fewer], tmp_path, over_sampling_batch_size=12)
    left, engine_of = list(first.pool.prompts), list(first.pool.engine_of.values())
    again.pool.restore(left, engine_of)
    again.pool._data.position = first.pool.position
    again.engines_with_carry = set(range(fewer))
    for number in (2, 3):
        again.round(f"run.{number}", 4)
    sent = Counter(
        prompt["id"] for engine in engines[:fewer] for body in engine.bodies[1:] for prompt in body["prompts"]
    )
    lost = {name for name, engine in zip(left, engine_of, strict=True) if engine >= fewer}
    assert lost
    assert lost <= set(sent)
    assert set(sent.values()) == {1}
    assert set(again.pool.engine_of.values()) <= set(range(fewer))


@pytest.mark.parametrize("arrived", [False, True])
def test_replacement_in_flight_at_a_crash_is_sent_again_and_not_duplicated(tmp_path: Path, arrived: bool) -> None:
    """The first of four groups is unusable: its replacement is stored and sent, but the reply is lost."""
    engines = [FakePoolEngine()]
    extend, died = engines[0].extend, threading.Event()

    def failing_extend(*args: Any, **fields: Any) -> None:
        if arrived or died.is_set():
            extend(*args, **fields)
        if not died.is_set():
            engines[0].dies_after = 1
            died.set()
            with engines[0].changed:
                engines[0].changed.notify_all()
            raise ConnectionError("the engine died")

    engines[0].extend, engines[0].may_finish = failing_extend, 1  # type: ignore[method-assign]
    kinds = ("half", *["ok"] * 20)
    driver = rollout_driver(engines, tmp_path, kinds, over_sampling_batch_size=4, dynamic_sampling=True)
    driver.engines_with_carry = {0}
    with pytest.raises(ConnectionError):
        driver.round("run.1", 4)
    assert died.is_set()
    engines[0].dies_after, engines[0].may_finish = None, 10**6
    rollout = driver.round("run.1", 4)
    assert sorted(scored.group.id for scored in rollout.groups) == ["e0-1", "e0-2", "e0-3", "e0-4"]
    assert (rollout.replaced, rollout.rejected + rollout.unscored) == (1, 1)
    assert not driver.pool.prompts
    assert driver.pool.position == len(engines[0].delivered) == 5


def test_replacement_for_an_engine_that_has_ended_belongs_to_the_engine_that_took_it(tmp_path: Path) -> None:
    """Engine 0 has finished all that it had. By the number of prompts, the replacement is for engine 0."""
    engines = [FakePoolEngine(), FakePoolEngine()]
    driver = rollout_driver(engines, tmp_path, over_sampling_batch_size=4, dynamic_sampling=True)
    engines[1].may_finish = 0
    collector = collector_of(driver, "run.1")
    events = driver.client.stream(**driver._request("run.1", driver.pool.draw(4), 4))
    for event in (next(events), next(events)):
        driver.client.judge("run.1", accept=[event.id])  # type: ignore[union-attr]
    until(lambda: engines[0].rounds["run.1"].ended is not None, "the round has ended at engine 0")
    assert collector._extend(quota_add=0)
    assert driver.pool.engine_of == {"e0-0": 0, "e0-1": 1, "e0-2": 0, "e0-3": 1, "e0-4": 1}
    assert engines[1].waiting == ["e0-1", "e0-3", "e0-4"]


# --- validation


def test_several_servers_from_flags() -> None:
    flags = ["--hf-checkpoint", "m", "--prompt-data", "d", "--server", "http://a", "--server", "http://b"]
    made = load(None, vars(config_parser().parse_args(flags)))
    assert made.servers == ["http://a", "http://b"]
    check(made)
    assert load(None, {"hf_checkpoint": "m", "prompt_data": "d", "server": "http://a"}).servers == ["http://a"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"server": ["http://a", "http://a"]}, "same URL twice"),
        ({"server": "http://a", "engines": 2}, "engines"),
        ({"engines": 2, "after_quota": "continue"}, "after_quota"),
        ({"engines": 2, "quota_mode": "cohort"}, "quota_mode"),
        ({"engines": 2, "quota_unit": "sample", "advantage_estimator": "reinforce"}, "quota_unit"),
        ({"engines": 2, "partial_rollout": False}, "over_sampling_batch_size: must be rollout_batch_size"),
        ({"engines": 2, "strict_on_policy": True}, "over_sampling_batch_size: must be rollout_batch_size"),
        ({"engines": 2, "max_staleness": 0}, "over_sampling_batch_size: must be rollout_batch_size"),
    ],
)
def test_settings_without_support_for_several_engines_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load(None, {"hf_checkpoint": "m", "prompt_data": "d", **fields}))


@pytest.mark.parametrize("fields", [{"partial_rollout": False}, {"strict_on_policy": True}, {"max_staleness": 0}])
def test_nothing_is_carried_with_a_staleness_bound_of_zero(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Two engines, one of them slow; an unusable group is replaced in the same round."""
    fields = {**fields, "over_sampling_batch_size": 4, "dynamic_sampling": True, "advantage_estimator": "dapo"}
    check(load(None, {**BASE, "engines": 2, **fields}))
    engines = [FakePoolEngine(), FakePoolEngine()]
    driver = rollout_driver(engines, tmp_path, ("equal", *["ok"] * 20), **fields)
    for number in range(3):
        rollout = driver.round(f"run.{number}", 4)
        assert len(rollout.groups) == 4
        assert not driver.pool.prompts
        assert not any(engine.waiting or engine.finished for engine in engines)
        assert all(engine.bodies[-1]["max_staleness"] == 0 for engine in engines)
