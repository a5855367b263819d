"""One quota over several engines: exactly so many groups, each once, whoever is slow, dies, or is asked again."""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_april.client import AprilError
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.bridge.fake_engine_pool import FakeEngine
from tests.bridge.test_rollout import FakeRewards
from tests.support.live import until
from trainer_bridge.args import load, parser
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.data import PromptData
from trainer_bridge.engine_pool import EnginePool, merge_stats
from trainer_bridge.rollout import RolloutDriver, ScoredRollout
from trainer_bridge.validate import check

Made = tuple[EnginePool, list[FakeEngine]]


def fleet(count: int = 2) -> Made:
    engines = [FakeEngine() for _ in range(count)]
    return EnginePool(engines), engines  # type: ignore[arg-type]


def body(round_id: str, names: str, quota: int | None, **more: Any) -> dict[str, Any]:
    """Prompts `a3 b1`: a letter for the engine, and a number."""
    prompts = [{"id": name, "engine": "abc".index(name[0]), "n": 2} for name in names.split()]
    return {"run": "r", "round_id": round_id, "prompts": prompts, "quota": quota, "count": "finished", **more}


def told(made: EnginePool, asked: dict[str, Any]) -> RolloutSummary:
    """The summary of a round; every group that it names was streamed before."""
    events = list(made.stream(**asked))
    summary = events.pop()
    assert isinstance(summary, RolloutSummary)
    assert {named["id"] for named in summary.delivered} <= {
        event.id for event in events if isinstance(event, RolloutGroup)
    }
    return summary


def ids(summary: RolloutSummary) -> list[str]:
    return [named["id"] for named in summary.delivered]


def test_exactly_the_quota_comes_and_the_rest_stays_where_it_is() -> None:
    made, engines = fleet()
    first = told(made, body("r.1", "a1 b1 a2 b2 a3 b3 a4 b4", 3))
    assert (first.end_reason, len(ids(first))) == ("quota", 3)
    assert [{name[0] for name in engine.waiting + engine.finished} for engine in engines] == [{"a"}, {"b"}]
    assert first.carried["groups"] == 5
    rest = told(made, body("r.2", "", None))
    assert rest.end_reason == "exhausted"
    assert sorted([*ids(first), *ids(rest)]) == ["a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4"]


def test_engines_are_asked_without_a_quota_and_with_their_own_prompts() -> None:
    made, engines = fleet()
    told(made, body("r.1", "a1 b1 a2", 2))
    assert [[prompt["id"] for prompt in engine.bodies[0]["prompts"]] for engine in engines] == [["a1", "a2"], ["b1"]]
    assert all((e.bodies[0]["quota"], e.bodies[0]["count"]) == (None, "accepted") for e in engines)
    assert not any("engine" in prompt for engine in engines for prompt in engine.bodies[0]["prompts"])


def test_a_slow_engine_is_stopped_when_the_others_meet_the_quota() -> None:
    made, engines = fleet(3)
    engines[2].may_finish = 0
    summary = told(made, body("r.1", "a1 a2 a3 b1 b2 b3 c1", 4))
    assert len(ids(summary)) == 4
    assert engines[2].waiting == ["c1"]


def test_surplus_is_first_in_the_next_round() -> None:
    made, engines = fleet()
    for event in made.stream(**body("r.1", "a1 a2 b1 b2", 1)):
        if isinstance(event, RolloutGroup):
            until(lambda: not any(engine.waiting for engine in engines), "all have finished")
    for engine in engines:
        engine.may_finish = 0
    surplus = [name for engine in engines for name in engine.finished]
    assert len(surplus) == 3
    assert sorted(ids(told(made, body("r.2", "a3", 3)))) == sorted(surplus)


def test_a_group_at_the_staleness_bound_is_waited_for_and_counts() -> None:
    """It is the last to finish, and the quota is met with it, not beyond it."""
    made, engines = fleet()
    engines[1].mandatory, engines[1].may_finish = {"b2"}, 0
    events = made.stream(**body("r.1", "a1 a2 a3 a4 b1 b2", 3))
    seen: list[str] = []
    for event in events:
        if isinstance(event, RolloutSummary):
            assert "b2" in ids(event)
            assert len(ids(event)) == 3
            break
        seen.append(event.id)
        if len(seen) == 4:
            assert len([name for engine in engines for name, fit in engine.verdicts.items() if fit]) <= 2
            with engines[1].turn:
                engines[1].may_finish = 2
                engines[1].turn.notify_all()


def test_more_groups_at_the_bound_than_the_quota_all_come() -> None:
    made, engines = fleet()
    engines[0].mandatory, engines[1].mandatory = {"a1", "a2"}, {"b1"}
    assert sorted(ids(told(made, body("r.1", "a1 a2 b1 b2", 2)))) == ["a1", "a2", "b1"]


def dies(events: Iterator[RolloutGroup | RolloutSummary], after: int) -> None:
    """A coordinator that is killed: it reads so many events, and says nothing more."""
    for _ in range(after):
        next(events)


@pytest.mark.parametrize("after", range(1, 7))
def test_asked_again_after_the_coordinators_death_it_is_the_same_quota(after: int) -> None:
    made, engines = fleet()
    asked = body("r.1", "a1 b1 a2 b2 a3 b3 a4 b4", 5)
    dies(made.stream(**asked), after)
    again = told(EnginePool(engines), asked)  # type: ignore[arg-type]
    assert (len(ids(again)), len(set(ids(again)))) == (5, 5)
    assert Counter(name for engine in engines for name in engine.delivered) == Counter(ids(again))
    last = told(EnginePool(engines), asked)  # type: ignore[arg-type]
    assert sorted(ids(last)) == sorted(ids(again)), "the same reply once it is fixed"


def test_killed_between_two_stops_no_more_than_the_quota_comes() -> None:
    made, engines = fleet()
    asked = body("r.1", "a1 a2 a3 b1 b2 b3", 4)
    dies(made.stream(**asked), 3)
    engines[0].stop("r.1")
    assert len(ids(told(EnginePool(engines), asked))) == 4  # type: ignore[arg-type]


def test_the_death_of_one_engine_is_raised_and_the_round_asked_for_again() -> None:
    made, engines = fleet()
    engines[1].dies_after = 1
    asked = body("r.1", "a1 a2 b1 b2 b3 b4", 5)
    with pytest.raises(ConnectionError):
        told(made, asked)
    engines[1].dies_after = None
    assert len(ids(told(made, asked))) == 5


def test_verdicts_go_to_the_engine_that_has_the_group() -> None:
    made, _ = fleet()
    asked = body("r.1", "a1 b1 a2 b2 a3 b3", 3, count="accepted")
    for event in made.stream(**asked):
        if isinstance(event, RolloutSummary):
            break
        fit = event.id[1] != "1"
        made.judge("r.1", [event.id] if fit else [], [] if fit else [event.id])
    accepted = {named["id"]: named["accepted"] for named in event.delivered}
    assert sum(accepted.values()) == 3
    assert all(fit == (name[1] != "1") for name, fit in accepted.items())
    with pytest.raises(AprilError, match="has ended"):
        made.judge("r.1", ["a2"])


def test_an_extension_adds_to_the_one_quota() -> None:
    made, _ = fleet()
    asked = body("r.1", "a1 b1", 2)
    for extended, event in enumerate(made.stream(**asked)):
        if isinstance(event, RolloutSummary):
            break
        if extended == 0:
            made.extend("r.1", 1, [{"id": "b9", "engine": 1, "n": 2}])
    assert sorted(ids(event)) == ["a1", "b1", "b9"]


def test_figures_are_added_up() -> None:
    """Samples at once: 2, and 4 from 0.5 s, at one; 3 and none from 1 s at the other, which ends later."""
    parts = [
        {"duration_s": 1.0, "mean_running": 3.0, "tokens": 5, "timeline": [[0.0, 2], [0.5, 4]]},
        {"duration_s": 2.0, "mean_running": 1.5, "tokens": 6, "timeline": [[0.0, 3], [1.0, 0]]},
    ]
    made = merge_stats(parts)
    assert (made["duration_s"], made["mean_running"], made["tokens"]) == (2.0, 3.0, 11)
    assert made["timeline"] == [[0.0, 2], [0.0, 5], [0.5, 7], [1.0, 4]]


# --- with the bridge's rounds


def rollouts(
    engines: list[FakeEngine], folder: Path, labels: Sequence[str] = ("ok",) * 400, **fields: Any
) -> RolloutDriver:
    config = Config(hf_checkpoint="m", prompt_data="d", rollout_batch_size=4, n_samples_per_prompt=2, **fields)
    data = PromptData([{"input": f"q{i}", "label": label} for i, label in enumerate(labels)], config)
    clients: Any = EnginePool(engines)  # type: ignore[arg-type]
    rewards: Any = FakeRewards()
    return RolloutDriver(clients, "run", data, rewards, config, Checkpoints(folder, 1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_books_over_many_rounds(tmp_path: Path, dynamic: bool) -> None:
    """Unfit groups are replaced, engines are unevenly fast, and every prompt handed over is delivered exactly once."""
    engines, rng = [FakeEngine(), FakeEngine(), FakeEngine()], random.Random(1)
    kinds = random.Random(0).choices(("ok", "ok", "equal", "half"), k=400)
    made = rollouts(engines, tmp_path, kinds, over_sampling_batch_size=12, dynamic_sampling=dynamic)
    trained: Counter[str] = Counter()
    for number in range(30):
        slow = rng.randrange(4)
        for i, engine in enumerate(engines):
            engine.may_finish = rng.randrange(2) if i == slow else 10**6
        done: ScoredRollout = made.round(f"run.{number}", 4)
        accepted = len(done.groups) + (0 if dynamic else done.unscored - done.replaced)
        assert accepted == 4
        trained.update(scored.group.id for scored in done.groups)
        loads = Counter(made.homes.values())
        assert set(made.homes) == set(made.pending)
        assert sum(loads.values()) == sum(len(e.waiting) + len(e.finished) for e in engines)
    for engine in engines:
        engine.may_finish = 10**6
    trained.update(scored.group.id for scored in made.round("run.30", None).groups)
    assert set(trained.values()) == {1}
    assert not made.pending
    delivered = Counter(name for engine in engines for name in engine.delivered)
    assert set(delivered.values()) == {1}
    assert len(delivered) == made._data.position


def test_a_prompt_goes_to_the_engine_with_the_fewest_and_a_new_engine_gets_its_own_again(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[0].may_finish = 0
    made = rollouts(engines, tmp_path, over_sampling_batch_size=12)
    made.round("run.1", 2)
    left = Counter(made.homes.values())
    made.round("run.2", 2)
    handed = [len(engine.bodies[1]["prompts"]) for engine in engines]
    assert left[0] + handed[0] == left[1] + handed[1] == 6
    lost = [name for name, home in made.homes.items() if home == 1]
    engines[1] = made._client.clients[1] = FakeEngine()  # type: ignore[union-attr,index,call-overload]
    made.held = {0}
    made.round("run.3", 2)
    assert {prompt["id"] for prompt in engines[1].bodies[0]["prompts"]} >= set(lost)
    assert not {prompt["id"] for prompt in engines[0].bodies[2]["prompts"]} & set(lost)


@pytest.mark.parametrize("arrived", [False, True])
def test_a_replacement_that_was_on_its_way_at_a_death_is_sent_again_and_not_doubled(
    tmp_path: Path, arrived: bool
) -> None:
    """The first of four groups is unfit: its replacement is noted, sent, and the answer never comes."""
    engines = [FakeEngine()]
    extend, died = engines[0].extend, threading.Event()

    def dying(*args: Any, **fields: Any) -> None:
        if arrived or died.is_set():
            extend(*args, **fields)
        if not died.is_set():
            engines[0].dies_after = 1
            died.set()
            with engines[0].turn:
                engines[0].turn.notify_all()
            raise ConnectionError("the engine died")

    engines[0].extend, engines[0].may_finish = dying, 1  # type: ignore[method-assign]
    kinds = ("half", *["ok"] * 20)
    made = rollouts(engines, tmp_path, kinds, over_sampling_batch_size=4, dynamic_sampling=True)
    made.held = {0}
    with pytest.raises(ConnectionError):
        made.round("run.1", 4)
    assert died.is_set()
    engines[0].dies_after, engines[0].may_finish = None, 10**6
    done = made.round("run.1", 4)
    assert sorted(scored.group.id for scored in done.groups) == ["e0-1", "e0-2", "e0-3", "e0-4"]
    assert (done.replaced, done.rejected + done.unscored) == (1, 1)
    assert not made.pending
    assert made._data.position == len(engines[0].delivered) == 5


# --- what is refused


def test_several_servers_by_flags() -> None:
    words = ["--hf-checkpoint", "m", "--prompt-data", "d", "--server", "http://a", "--server", "http://b"]
    made = load(None, vars(parser().parse_args(words)))
    assert made.servers == ["http://a", "http://b"]
    check(made)
    assert load(None, {"hf_checkpoint": "m", "prompt_data": "d", "server": "http://a"}).servers == ["http://a"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"server": ["http://a", "http://a"]}, "twice"),
        ({"server": "http://a", "engines": 2}, "engines"),
        ({"engines": 2, "after_quota": "continue"}, "after_quota"),
        ({"engines": 2, "quota_mode": "cohort"}, "quota_mode"),
        ({"engines": 2, "quota_unit": "sample", "advantage_estimator": "reinforce"}, "quota_unit"),
        ({"engines": 2, "partial_rollout": False}, "over_sampling_batch_size: must be rollout_batch_size"),
        ({"engines": 2, "strict_on_policy": True}, "over_sampling_batch_size: must be rollout_batch_size"),
        ({"engines": 2, "max_staleness": 0}, "over_sampling_batch_size: must be rollout_batch_size"),
    ],
)
def test_what_one_quota_over_several_engines_cannot_do_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(load(None, {"hf_checkpoint": "m", "prompt_data": "d", **fields}))


@pytest.mark.parametrize("fields", [{"partial_rollout": False}, {"strict_on_policy": True}, {"max_staleness": 0}])
def test_nothing_is_left_over_where_all_that_begins_is_waited_for(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A staleness bound of 0 over two engines, one of which is slow; an unfit group is replaced in the same round."""
    fields = {**fields, "over_sampling_batch_size": 4, "dynamic_sampling": True, "advantage_estimator": "dapo"}
    base = {"hf_checkpoint": "m", "prompt_data": "d", "engines": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
    check(load(None, {**base, **fields}))
    engines = [FakeEngine(), FakeEngine()]
    made = rollouts(engines, tmp_path, ("equal", *["ok"] * 20), **fields)
    for number in range(3):
        done = made.round(f"run.{number}", 4)
        assert len(done.groups) == 4
        assert not made.pending
        assert not any(engine.waiting or engine.finished for engine in engines)
        assert all(engine.bodies[-1]["max_staleness"] == 0 for engine in engines)
