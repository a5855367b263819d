"""Prompts that are added to a round over several engines."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_april.client import AprilError
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.shared_round import SharedRound
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.bridge.engine_pool_rounds import delivered_ids, engine_pool, refuse, request
from tests.bridge.fake_engine_pool import FakePoolEngine
from tests.support.live import until


def at_an_engine_that_has_ended() -> tuple[EnginePool, list[FakePoolEngine], Iterator[Any]]:
    """A round in which both groups of engine a are accepted, while engine b has two unfinished groups."""
    pool, engines = engine_pool()
    engines[1].may_finish = 0
    events = pool.stream(**request("r.1", "a1 a2 b1 b2", 4, count="accepted"))
    for event in (next(events), next(events)):
        pool.judge("r.1", accept=[event.id])  # type: ignore[union-attr]
    until(lambda: engines[0].rounds["r.1"].ended is not None, "the round has ended at engine a")
    return pool, engines, events


def test_extension_of_an_engine_that_has_ended_goes_to_the_others() -> None:
    """The engine has nothing left to finish, while the quota of the pool is open."""
    pool, engines, events = at_an_engine_that_has_ended()
    pool.extend("r.1", 0, [{"id": "n1", "n": 2}, {"id": "n2", "n": 2}, {"id": "a3", "engine": 0, "n": 2}])
    assert [engine.waiting for engine in engines] == [[], ["b1", "b2", "n2", "n1", "a3"]]
    assert pool.moved == {"a3": 1}
    with engines[1].changed:
        engines[1].may_finish = 3
        engines[1].changed.notify_all()
    pool.judge("r.1", reject=[next(events).id])
    pool.judge("r.1", accept=[next(events).id, next(events).id])
    assert delivered_ids(next(events)) == ["a1", "a2", "b1", "b2", "n2"]


def test_extension_is_refused_when_the_round_has_ended_at_all_engines() -> None:
    pool, engines, _ = at_an_engine_that_has_ended()
    engines[1].stop("r.1")
    with pytest.raises(AprilError, match="ended at all engines") as caught:
        pool.extend("r.1", 1, [{"id": "n1", "n": 2}])
    assert (caught.value.status, caught.value.field) == (409, "round_id")


def test_prompt_that_an_ended_engine_has_finished_is_not_sent_to_another() -> None:
    """Its first extension was sent, and the answer lost; then the trainer is restarted, and repeats both."""
    pool, engines, _ = at_an_engine_that_has_ended()
    again, sent = EnginePool(engines), [{"id": "a2", "engine": 0, "n": 2}]  # type: ignore[arg-type]
    with pytest.raises(AprilError, match=r"'a2'.* finished"):
        pool.extend("r.1", 0, sent)
    events = again.stream(**request("r.1", "a1 a2 b1 b2", 4, count="accepted"))
    assert isinstance(next(events), RolloutGroup)
    with pytest.raises(AprilError, match=r"'a2'.* finished"):
        again.extend("r.1", 0, sent)
    assert engines[1].waiting == ["b1", "b2"]


def test_an_extension_that_failed_at_one_engine_can_be_repeated() -> None:
    pool, engines = engine_pool()
    for engine in engines:
        engine.may_finish = 0
    events = pool.stream(**request("r.1", "a1 b1", 4))
    reader = threading.Thread(target=lambda: list(events), daemon=True)
    reader.start()
    until(lambda: all(engine.waiting for engine in engines), "the round is open")
    more = request("r.1", "a2 b2", 0)["prompts"]
    extend = engines[1].extend
    engines[1].extend = refuse  # type: ignore[method-assign]
    with pytest.raises(AprilError, match="lost"):
        pool.extend("r.1", 2, more)
    engines[1].extend = extend  # type: ignore[method-assign]
    with pytest.raises(AprilError, match="undelivered"):
        pool.extend("r.1", 2, more)
    assert [engine.waiting for engine in engines] == [["a1", "a2"], ["b1", "b2"]]


def test_an_extension_ends_with_its_round() -> None:
    """Each call to an engine that has died lasts for `retry_s`."""
    _, engines = engine_pool()
    shared = SharedRound(engines, request("r.1", "a1 b1", 4))  # type: ignore[arg-type]

    def close(*_arguments: Any, **_fields: Any) -> None:
        shared.close()
        refuse()

    engines[0].extend = close  # type: ignore[method-assign]
    with pytest.raises(AprilError, match="lost"):
        shared.extend(1, request("r.1", "a2 b2", 0)["prompts"])
    assert (shared.sent, engines[1].waiting) == ({"a2": 0}, [])
    with pytest.raises(AprilError, match="has ended") as caught:
        shared.extend(1, request("r.1", "b3", 0)["prompts"])
    assert caught.value.status == 409


def test_extension_raises_the_common_quota() -> None:
    pool, _ = engine_pool()
    body = request("r.1", "a1 b1", 2)
    for extended, event in enumerate(pool.stream(**body)):
        if isinstance(event, RolloutSummary):
            break
        if extended == 0:
            pool.extend("r.1", 1, [{"id": "b9", "engine": 1, "n": 2}])
    assert sorted(delivered_ids(event)) == ["a1", "b1", "b9"]


def test_a_repeated_extension_finds_the_engine_that_an_earlier_attempt_has_moved_it_to() -> None:
    """The trainer that repeats the round knows nothing of the moves, and draws the same prompts for other engines."""
    pool, engines = engine_pool(3)
    engines[1].may_finish = engines[2].may_finish = 0
    body = request("r.1", "a1 b1 c1", 6, count="accepted")
    events = pool.stream(**body)
    next(events)
    pool.judge("r.1", accept=["a1"])
    until(lambda: engines[0].rounds["r.1"].ended is not None, "the round has ended at the first engine")
    for i in range(3):
        pool.extend("r.1", prompts=[{"id": f"new {i}", "n": 2, "engine": 0}])
    assert {len(engine.waiting) for engine in engines[1:]} == {2, 3}, "one engine got all of them"
    held = [list(engine.waiting) for engine in engines]
    again = EnginePool(engines)  # type: ignore[arg-type]
    repeated = again.stream(**body)
    next(repeated)
    for i in range(3):
        with pytest.raises(AprilError, match="is still undelivered"):
            again.extend("r.1", prompts=[{"id": f"new {i}", "n": 2, "engine": i}])
    assert [engine.waiting for engine in engines] == held
