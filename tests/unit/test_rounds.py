"""Rounds by id, kept replies, and readers of SGLang's weight lock."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sglang_april.api.errors import RequestError
from sglang_april.api.messages import RoundSpec
from sglang_april.http.reply import Reply
from sglang_april.http.rounds import RoundRecord, RoundRegistry
from sglang_april.http.weight_lock import WeightLock
from tests.unit.scripted_engine import sglang_rwlock

Scenario = Callable[[], Coroutine[Any, Any, None]]


def scenario(test: Scenario) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    run.__name__ = test.__name__
    return run


def record(name: str, run: str, fingerprint: str = "body", keep: bool = False) -> RoundRecord:
    return RoundRecord(RoundSpec(name, run, 1, "group", "auto", None, keep_until_ack=keep, fingerprint=fingerprint))


def ended(rounds: RoundRegistry, name: str, run: str = "run", keep: bool = False, nbytes: int = 10) -> RoundRecord:
    """A round that has been opened, ended and answered."""
    round_, new = rounds.admit(record(name, run, keep=keep))
    assert new
    rounds.mark_open(round_)
    rounds.mark_ended(round_)
    rounds.keep(round_, Reply(name, run, 0, "quota", [], {}, {}, nbytes))
    return round_


def status(call: Callable[[], Any]) -> int:
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value.status


@scenario
async def test_the_last_replies_of_each_run_are_kept_and_older_ids_are_gone() -> None:
    rounds = RoundRegistry(2, 1000)
    for i in range(4):
        ended(rounds, f"a{i}", "a")
        ended(rounds, f"b{i}", "b")
    assert rounds.find("a3").id == "a3"
    assert rounds.find("b2").id == "b2"
    assert status(lambda: rounds.find("a1")) == 410
    assert status(lambda: rounds.find("c0")) == 404
    assert status(lambda: rounds.admit(record("a1", "a", "body"))) == 410
    assert (rounds.kept, rounds.kept_bytes) == (4, 40)


@scenario
async def test_replies_of_the_latest_runs_are_kept() -> None:
    rounds = RoundRegistry(2, 1000)
    names = ["protected", *(f"r{i}" for i in range(5))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang_april.http.rounds.MAX_RUNS", 3)
        for name in names:
            ended(rounds, name, run=name, keep=name == "protected")
    assert [name for name in names if rounds.contains(name)] == ["protected", "r2", "r3", "r4"]


@scenario
async def test_a_reply_kept_until_ack_outlives_the_last_ones() -> None:
    rounds = RoundRegistry(2, 1000)
    ended(rounds, "kept", keep=True)
    for i in range(5):
        ended(rounds, f"r{i}")
    assert rounds.find("kept")
    assert rounds.acknowledge("kept").id == "kept"
    assert status(lambda: rounds.find("kept")) == 410


@scenario
async def test_unacknowledged_replies_beyond_the_memory_refuse_new_rounds() -> None:
    rounds = RoundRegistry(2, 25)
    for i in range(3):
        ended(rounds, f"r{i}", keep=True)
    assert status(lambda: rounds.admit(record("r3", "run", "body"))) == 503
    assert all(rounds.find(f"r{i}") for i in range(3))
    assert not rounds.admit(record("r1", "run", "body"))[1]
    rounds.acknowledge("r0")
    assert rounds.admit(record("r3", "run", "body"))[1]


@scenario
async def test_replies_of_many_runs_stay_within_the_memory() -> None:
    rounds = RoundRegistry(2, 25)
    for i in range(10):
        ended(rounds, f"r{i}", run=f"run{i}")
    assert rounds.kept_bytes == 20
    ended(rounds, "big", run="big", nbytes=100)
    assert rounds.find("big")
    assert rounds.kept == 1


@scenario
async def test_replies_that_wait_for_their_ack_leave_the_last_replies_their_own_memory() -> None:
    rounds = RoundRegistry(2, 25)
    for i in range(2):
        ended(rounds, f"p{i}", run="protected", keep=True)
    for i in range(3):
        ended(rounds, f"r{i}")
    assert [name for name in ("p0", "p1", "r0", "r1", "r2") if rounds.contains(name)] == ["p0", "p1", "r1", "r2"]


@scenario
async def test_replies_that_no_connection_has_received_go_last() -> None:
    """The only reply of a run is not lost while its client repeats a broken request."""
    rounds = RoundRegistry(2, 25)
    ended(rounds, "waiting", run="waiting")
    for i in range(4):
        ended(rounds, f"r{i}", run=f"run{i}").reply.result().encode(packed=False)
    assert [name for name in ("waiting", "r0", "r1", "r2", "r3") if rounds.contains(name)] == ["waiting", "r3"]


@scenario
async def test_ids_of_deleted_replies_are_reported_for_the_journal() -> None:
    deleted: list[str] = []
    rounds = RoundRegistry(1, 1000, deleted.append)
    ended(rounds, "kept", keep=True)
    ended(rounds, "r0")
    ended(rounds, "r1")
    assert deleted == ["r0"]
    rounds.acknowledge("kept")
    assert deleted == ["r0", "kept"]


@scenario
async def test_ack_before_the_reply_or_of_an_unknown_round_is_refused() -> None:
    rounds = RoundRegistry(2, 100)
    rounds.admit(record("open", "run", "body"))
    assert status(lambda: rounds.acknowledge("open")) == 409
    assert status(lambda: rounds.acknowledge("none")) == 404


@scenario
async def test_an_ack_can_be_repeated_although_it_has_let_the_reply_go() -> None:
    """Clients repeat a call whose answer was lost."""
    rounds = RoundRegistry(1, 100)
    ended(rounds, "r0", keep=True)
    ended(rounds, "r1", keep=True)
    assert rounds.acknowledge("r0") is not None
    assert status(lambda: rounds.find("r0")) == 410
    assert rounds.acknowledge("r0") is None


@scenario
async def test_the_same_id_is_the_same_round_and_another_body_is_not() -> None:
    rounds = RoundRegistry(2, 100)
    first, _ = rounds.admit(record("x", "run", "body"))
    again, new = rounds.admit(record("x", "run", "body"))
    assert again is first
    assert not new
    assert status(lambda: rounds.admit(record("x", "run", "other"))) == 409
    assert status(lambda: rounds.admit(record("y", "run", "body"))) == 409
    rounds.refuse(first, RequestError(503, "push", "open"))
    assert status(lambda: rounds.find("x")) == 404
    assert rounds.admit(record("y", "run", "body"))[1]


@scenario
async def test_a_failed_round_answers_its_error_again_and_its_id_stays_taken() -> None:
    """With a journal, the id is used there, and its round would deliver after a restart."""
    rounds = RoundRegistry(2, 100)
    failed, _ = rounds.admit(record("x", "run"))
    rounds.mark_open(failed)
    rounds.mark_ended(failed)
    rounds.fail(failed, RequestError(500, "server", "lost"))
    assert status(lambda: rounds.admit(record("x", "run"))) == 500
    assert status(lambda: rounds.find("x")) == 500
    assert rounds.admit(record("y", "run"))[1]


@scenario
async def test_reader_blocks_a_writer_until_it_is_released() -> None:
    lock = sglang_rwlock()
    weight_lock = WeightLock(lock)
    await weight_lock.acquire("a")
    await weight_lock.acquire("b")
    writer = asyncio.create_task(lock.acquire_writer())
    await weight_lock.release("a")
    await asyncio.sleep(0.01)
    assert not writer.done()
    await weight_lock.release_all("push")
    await asyncio.wait_for(writer, 1)
    weight_lock.unblock("push", ["b"])
    await asyncio.sleep(0.01)
    assert not weight_lock.held
    await lock.release_writer()
    await asyncio.sleep(0.01)
    assert weight_lock.held == {"b"}
    await weight_lock.release("b")
    assert not await lock.is_locked()


@scenario
async def test_readers_return_after_both_push_and_pause_end() -> None:
    lock = sglang_rwlock()
    weight_lock = WeightLock(lock)
    await weight_lock.acquire("a")
    await weight_lock.release_all("push")
    await weight_lock.release_all("pause")
    weight_lock.unblock("push", ["a"])
    await asyncio.sleep(0.01)
    assert not weight_lock.held
    weight_lock.unblock("pause", ["a"])
    await asyncio.sleep(0.01)
    assert weight_lock.held == {"a"}


@scenario
async def test_round_that_ends_while_waiting_for_the_lock_holds_no_reader() -> None:
    lock = sglang_rwlock()
    weight_lock = WeightLock(lock)
    await weight_lock.acquire("a")
    await weight_lock.release_all("push")
    await lock.acquire_writer()
    weight_lock.unblock("push", ["a"])
    await asyncio.sleep(0)
    await weight_lock.release("a")
    await lock.release_writer()
    await asyncio.sleep(0.01)
    assert not await lock.is_locked()


@scenario
async def test_reader_acquired_during_a_push_is_released() -> None:
    lock = sglang_rwlock()
    weight_lock = WeightLock(lock)
    await lock.acquire_writer()
    opening = asyncio.create_task(weight_lock.acquire("a"))
    await asyncio.sleep(0)
    await weight_lock.release_all("push")
    await lock.release_writer()
    await opening
    assert not await lock.is_locked()
