"""One quota over several engines: exact delivery, with slow engines, crashes and repeated rounds."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_april.client import AprilError
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.merged_stats import merge_stats, sum_fields
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.bridge.engine_pool_rounds import delivered_ids, engine_pool, request, run_round
from tests.support.live import until


def test_exactly_the_quota_is_delivered_and_the_rest_stays_at_its_engine() -> None:
    pool, engines = engine_pool()
    first = run_round(pool, request("r.1", "a1 b1 a2 b2 a3 b3 a4 b4", 3))
    assert (first.end_reason, len(delivered_ids(first))) == ("quota", 3)
    assert [{name[0] for name in engine.waiting + engine.finished} for engine in engines] == [{"a"}, {"b"}]
    assert first.carried["groups"] == 5
    rest = run_round(pool, request("r.2", "", None))
    assert rest.end_reason == "exhausted"
    assert sorted([*delivered_ids(first), *delivered_ids(rest)]) == ["a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4"]


def test_without_previews_only_delivered_groups_are_streamed() -> None:
    """The engines are asked for previews all the same: the pool counts them."""
    pool, engines = engine_pool()
    *groups, summary = pool.stream(**request("r.1", "a1 b1 a2 b2 a3 b3 a4 b4", 3, previews=False))
    assert isinstance(summary, RolloutSummary)
    assert [group.id for group in groups if isinstance(group, RolloutGroup)] == delivered_ids(summary)
    assert (len(groups), [engine.bodies[0]["previews"] for engine in engines]) == (3, [True, True])


def test_engines_get_no_quota_and_only_their_own_prompts() -> None:
    pool, engines = engine_pool()
    run_round(pool, request("r.1", "a1 b1 a2", 2))
    assert [[prompt["id"] for prompt in engine.bodies[0]["prompts"]] for engine in engines] == [["a1", "a2"], ["b1"]]
    assert all((e.bodies[0]["quota"], e.bodies[0]["count"]) == (None, "accepted") for e in engines)
    assert not any("engine" in prompt for engine in engines for prompt in engine.bodies[0]["prompts"])


def test_slow_engine_is_stopped_when_the_others_meet_the_quota() -> None:
    pool, engines = engine_pool(3)
    engines[2].may_finish = 0
    summary = run_round(pool, request("r.1", "a1 a2 a3 b1 b2 b3 c1", 4))
    assert len(delivered_ids(summary)) == 4
    assert engines[2].waiting == ["c1"]


def test_surplus_is_delivered_first_in_the_next_round() -> None:
    pool, engines = engine_pool()
    for event in pool.stream(**request("r.1", "a1 a2 b1 b2", 1)):
        if isinstance(event, RolloutGroup):
            until(lambda: not any(engine.waiting for engine in engines), "the end of all groups")
    for engine in engines:
        engine.may_finish = 0
    surplus = [name for engine in engines for name in engine.finished]
    assert len(surplus) == 3
    assert sorted(delivered_ids(run_round(pool, request("r.2", "a3", 3)))) == sorted(surplus)


def test_without_a_quota_the_callers_verdicts_reach_the_engines() -> None:
    """They wait for them; this would wait for ever otherwise."""
    pool, engines = engine_pool()
    for event in pool.stream(**request("r.1", "a1 b1", None, count="accepted")):
        if isinstance(event, RolloutSummary):
            assert {named["id"]: named["accepted"] for named in event.delivered} == {"a1": True, "b1": False}
        elif event.id == "a1":
            pool.judge("r.1", accept=["a1"])
        else:
            pool.judge("r.1", reject=["b1"])
    assert all(engine.rounds["r.1"].ended for engine in engines)


def test_a_mandatory_group_of_an_engine_that_has_ended_is_not_waited_for() -> None:
    pool, engines = engine_pool()
    engines[0].mandatory, engines[0].may_finish = {"a1"}, 0
    events = pool.stream(**request("r.1", "a1 b1 b2", 2))
    assert isinstance(next(events), RolloutGroup)
    engines[0].stop("r.1")
    *_, summary = events
    assert isinstance(summary, RolloutSummary)
    assert delivered_ids(summary) == ["b1", "b2"]


def test_mandatory_group_is_waited_for_and_counts_towards_the_quota() -> None:
    """It finishes last and is part of the quota, not additional to it."""
    pool, engines = engine_pool()
    engines[1].mandatory, engines[1].may_finish = {"b2"}, 0
    events = pool.stream(**request("r.1", "a1 a2 a3 a4 b1 b2", 3))
    seen: list[str] = []
    for event in events:
        if isinstance(event, RolloutSummary):
            assert "b2" in delivered_ids(event)
            assert len(delivered_ids(event)) == 3
            break
        seen.append(event.id)
        if len(seen) == 4:
            assert len([name for engine in engines for name, accepted in engine.verdicts.items() if accepted]) <= 2
            with engines[1].changed:
                engines[1].may_finish = 2
                engines[1].changed.notify_all()


def test_all_mandatory_groups_are_delivered_even_beyond_the_quota() -> None:
    pool, engines = engine_pool()
    engines[0].mandatory, engines[1].mandatory = {"a1", "a2"}, {"b1"}
    assert sorted(delivered_ids(run_round(pool, request("r.1", "a1 a2 b1 b2", 2)))) == ["a1", "a2", "b1"]


def read_and_die(events: Iterator[RolloutGroup | RolloutSummary], after: int) -> None:
    """A trainer that is killed after reading this many events."""
    for _ in range(after):
        next(events)


@pytest.mark.parametrize("after", range(1, 7))
def test_round_repeated_after_a_crash_delivers_the_same_quota(after: int) -> None:
    pool, engines = engine_pool()
    body = request("r.1", "a1 b1 a2 b2 a3 b3 a4 b4", 5)
    read_and_die(pool.stream(**body), after)
    again = run_round(EnginePool(engines), body)  # type: ignore[arg-type]
    assert (len(delivered_ids(again)), len(set(delivered_ids(again)))) == (5, 5)
    assert Counter(name for engine in engines for name in engine.delivered) == Counter(delivered_ids(again))
    last = run_round(EnginePool(engines), body)  # type: ignore[arg-type]
    assert sorted(delivered_ids(last)) == sorted(delivered_ids(again)), "a fixed reply does not change"


def test_crash_between_two_stops_does_not_exceed_the_quota() -> None:
    pool, engines = engine_pool()
    body = request("r.1", "a1 a2 a3 b1 b2 b3", 4)
    read_and_die(pool.stream(**body), 3)
    engines[0].stop("r.1")
    assert len(delivered_ids(run_round(EnginePool(engines), body))) == 4  # type: ignore[arg-type]


def test_a_reply_that_waits_for_the_journal_counts_in_the_repeated_round() -> None:
    """The engine no longer lists the round, and has no reply yet."""
    pool, engines = engine_pool()
    body = request("r.1", "a1 a2 a3 b1 b2 b3", 4)
    read_and_die(pool.stream(**body), 3)
    engines[0].stop("r.1")
    engines[0].disk_full, get_round, reads = True, engines[0].get_round, list[Any]()

    def read(round_id: str) -> Any:
        reads.append(get_round(round_id))
        return reads[-1]

    engines[0].get_round = read  # type: ignore[method-assign]
    with ThreadPoolExecutor() as thread:
        again = thread.submit(run_round, EnginePool(engines), body)  # type: ignore[arg-type]
        until(lambda: len(reads) > 1 or engines[1].rounds["r.1"].ended, "the reply was read again")
        with engines[0].changed:
            engines[0].disk_full = False
            engines[0].changed.notify_all()
    assert len(delivered_ids(again.result())) == 4


def test_engine_failure_is_raised_and_the_round_can_be_repeated() -> None:
    pool, engines = engine_pool()
    engines[1].dies_after = 1
    body = request("r.1", "a1 a2 b1 b2 b3 b4", 5)
    with pytest.raises(ConnectionError):
        run_round(pool, body)
    engines[1].dies_after = None
    assert len(delivered_ids(run_round(pool, body))) == 5


def test_verdicts_are_sent_to_the_engine_of_the_group() -> None:
    pool, _ = engine_pool()
    body = request("r.1", "a1 b1 a2 b2 a3 b3", 3, count="accepted")
    for event in pool.stream(**body):
        if isinstance(event, RolloutSummary):
            break
        usable = event.id[1] != "1"
        pool.judge("r.1", [event.id] if usable else [], [] if usable else [event.id])
    accepted = {named["id"]: named["accepted"] for named in event.delivered}
    assert sum(accepted.values()) == 3
    assert all(verdict == (name[1] != "1") for name, verdict in accepted.items())
    with pytest.raises(AprilError, match="has ended"):
        pool.judge("r.1", ["a2"])


@pytest.mark.parametrize("quota", [2, None])
def test_a_verdict_on_an_unknown_group_is_refused_and_changes_nothing(quota: int | None) -> None:
    pool, _ = engine_pool()
    events = pool.stream(**request("r.1", "a1 b1", quota, count="accepted"))
    first = next(events)
    with pytest.raises(AprilError, match="404"):
        pool.judge("r.1", ["typo"])
    pool.judge("r.1", [first.id])
    for event in events:
        if isinstance(event, RolloutSummary):
            break
        pool.judge("r.1", [event.id])
    assert sorted(delivered_ids(event)) == ["a1", "b1"]


def test_a_group_that_a_push_makes_mandatory_is_waited_for() -> None:
    pool, engines = engine_pool()
    engines[1].may_finish = 0
    events = pool.stream(**request("r.1", "a1 a2 b1", 2, previews=True))
    next(events)
    engines[1].mandatory = {"b1"}
    with pool.push():
        pass
    engines[1].may_finish = 1
    with engines[1].changed:
        engines[1].changed.notify_all()
    *_, summary = events
    assert "b1" in delivered_ids(summary)


def test_times_ages_and_warnings_are_merged() -> None:
    parts = [
        {"duration_s": 1.0, "timeline": [], "t_opened": 5.0, "t_quota_met": None, "t_ended": 9.0, "prolonged": False},
        {"duration_s": 1.0, "timeline": [], "t_opened": 4.0, "t_quota_met": 7.0, "t_ended": 8.0, "prolonged": True},
    ]
    merged = merge_stats([{**parts[0], "warnings": ["a", "b"]}, {**parts[1], "warnings": ["b"]}])
    assert {name: merged[name] for name in ("t_opened", "t_quota_met", "t_ended", "prolonged", "warnings")} == {
        "t_opened": 4.0,
        "t_quota_met": 7.0,
        "t_ended": 9.0,
        "prolonged": True,
        "warnings": ["a", "b"],
    }
    carried = [{"tokens": 1, "oldest_staleness": 3, "tokens_by_tier": {"host": 1}}] * 2
    assert sum_fields(carried) == {"tokens": 2, "oldest_staleness": 3, "tokens_by_tier": {"host": 2}}


def test_statistics_are_merged() -> None:
    """Running samples: at one engine 2, then 4 from 0.5 s; at the other 3, then 0 from 1 s, and it ends later."""
    parts = [
        {"duration_s": 1.0, "mean_running": 3.0, "tokens": 5, "timeline": [[0.0, 2], [0.5, 4]]},
        {"duration_s": 2.0, "mean_running": 1.5, "tokens": 6, "timeline": [[0.0, 3], [1.0, 0]]},
    ]
    merged = merge_stats(parts)
    assert (merged["duration_s"], merged["mean_running"], merged["tokens"]) == (2.0, 3.0, 11)
    assert merged["timeline"] == [[0.0, 2], [0.0, 5], [0.5, 7], [1.0, 4]]


def test_when_an_engine_refuses_the_round_the_streams_of_the_others_are_read_to_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unread stream holds its connection for the life of the client."""
    pool, engines = engine_pool()
    read_to_end = threading.Event()

    def first(**_: Any) -> Iterator[RolloutGroup]:
        read_to_end.set()
        yield from ()

    def refuse(**_: Any) -> Iterator[RolloutGroup]:
        raise AprilError(400, "prompts", "are refused")

    monkeypatch.setattr(engines[0], "stream", first)
    monkeypatch.setattr(engines[1], "stream", refuse)
    with pytest.raises(AprilError, match="are refused"):
        run_round(pool, request("r.1", "a1 b1", 1))
    assert read_to_end.wait(timeout=10)
