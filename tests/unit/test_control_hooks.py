"""Refusals of SGLang's control calls, and one outcome of a weight call over all ranks."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import (
    AbortReq,
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    FlushCacheReqInput,
    UpdateWeightFromDiskReqInput,
)

from sglang_april.adapter.core import hooks_control, hooks_http
from sglang_april.adapter.core.hooks_scheduler import Process
from sglang_april.scheduler.version_clock import VersionClock
from tests.unit.weight_call_rank import report_outcomes


def test_weight_call_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    expected = {None: (True, "loaded"), 0: (False, "rank 0: bad tensor"), 1: (False, "rank 1: bad tensor")}
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    outcomes = context.Queue()
    ranks = [
        context.Process(target=report_outcomes, args=(rank, list(expected), str(tmp_path / "store"), outcomes))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    combined = [outcomes.get(timeout=300) for _ in range(len(ranks) * len(expected))]
    assert {(rank, failing): outcome for rank, failing, outcome in combined} == {
        (rank, failing): outcome for rank in (0, 1) for failing, outcome in expected.items()
    }
    for rank in ranks:
        rank.join()


@pytest.mark.parametrize(("tp_size", "timeout_s", "refused"), [(2, 5.0, True), (2, 0.0, False), (1, 5.0, False)])
def test_flush_with_a_timeout_is_refused_on_several_ranks(
    monkeypatch: pytest.MonkeyPatch, tp_size: int, timeout_s: float, refused: bool
) -> None:
    """SGLang's timeout runs on each rank's own clock, so ranks could decide differently."""
    interrupted: list[bool] = []
    april = SimpleNamespace(interrupt=lambda: interrupted.append(True))
    monkeypatch.setattr(Process, "scheduler", SimpleNamespace(ps=SimpleNamespace(tp_size=tp_size), april=april))
    output = hooks_control.flush_request(lambda *_: "flushed", None, FlushCacheReqInput(timeout_s=timeout_s))
    if refused:
        assert not output.success
        assert "refused with TP > 1" in output.message
    else:
        assert output == "flushed"
    assert len(interrupted) == (not refused)


@pytest.mark.parametrize(
    ("flush", "idle", "refused"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_weight_call_with_flush_is_refused_while_requests_are_in_flight(flush: bool, idle: bool, refused: bool) -> None:
    """SGLang would load the weights, then fail an assertion because the flush needs an idle engine."""
    ended: list[tuple[bool, str, bool]] = []
    controller = SimpleNamespace(
        interrupt=lambda: None,
        weight_call_ended=lambda ok, why, whole, refused, named: ended.append((ok, why, refused)),
        context=SimpleNamespace(clock=VersionClock()),
    )
    manager = SimpleNamespace(scheduler=SimpleNamespace(april=controller), is_fully_idle=lambda: idle)
    loaded = SimpleNamespace(success=True, message="loaded")
    request = UpdateWeightFromDiskReqInput(model_path="model", flush_cache=flush)
    output = hooks_control.weight_call(lambda *_: loaded, manager, request)
    assert output.success is not refused
    assert [(ok, known) for ok, _, known in ended] == [(not refused, refused)]
    if refused:
        assert "other requests are in flight" in output.message


@pytest.mark.parametrize(("label", "version"), [("12", 12), ("0", 0), ("default", None), ("-1", None), (None, None)])
def test_a_whole_number_as_weight_version_names_the_policy_version(label: str | None, version: int | None) -> None:
    assert hooks_control.named_version(label) == version


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize(
    ("stock", "known", "refused"),
    [(0, [], False), (1, ["a"], True), (0, ["left behind"], False), (1, ["HEALTH_CHECK_1"], False)],
)
def test_memory_release_is_refused_during_a_stock_request(
    paused: bool, stock: int, known: list[str], refused: bool
) -> None:
    """SGLang's table of requests is asked for health checks only, because entries stay in it after refused requests."""
    manager: Any = SimpleNamespace(
        is_pause=paused,
        april=SimpleNamespace(rounds=SimpleNamespace(holding_ids=list)),
        model_update_lock=SimpleNamespace(stock=stock),
        rid_to_state=dict.fromkeys(known),
    )
    with pytest.raises(ValueError, match="a stock request is in flight") if refused else nullcontext():
        asyncio.run(hooks_http._refuse_while_busy(manager))


def test_memory_release_waits_for_the_end_of_an_answered_request() -> None:
    """Python closes the generator of a request, and with it the lock, after SGLang's route has taken its answer."""
    lock = SimpleNamespace(stock=1)
    rounds = SimpleNamespace(holding_ids=list)
    manager: Any = SimpleNamespace(
        is_pause=False, april=SimpleNamespace(rounds=rounds), model_update_lock=lock, rid_to_state={}
    )

    async def release() -> None:
        asyncio.get_running_loop().call_later(0.001, setattr, lock, "stock", 0)
        await hooks_http._refuse_while_busy(manager)

    asyncio.run(release())


@pytest.mark.parametrize(
    ("tags", "saver", "backup", "lost"),
    [
        (None, True, False, True),
        (["weights"], True, False, True),
        (["kv_cache"], True, False, False),
        (None, True, True, False),
        (None, False, False, False),
    ],
)
def test_released_weights_are_lost_unless_a_copy_is_kept(
    tags: list[str] | None, saver: bool, backup: bool, lost: bool
) -> None:
    calls: list[str] = []
    record = {name: lambda name=name: calls.append(name) for name in ("interrupt", "evacuate", "weights_lost")}
    args = SimpleNamespace(enable_memory_saver=saver, enable_weights_cpu_backup=backup)
    scheduler = SimpleNamespace(april=SimpleNamespace(**record), server_args=args)
    manager = SimpleNamespace(scheduler=scheduler, is_fully_idle=lambda: True)
    request = SimpleNamespace(tags=tags)
    assert hooks_control.release_memory(lambda *_: calls.append("release"), manager, request) is None
    assert calls == ["interrupt", *["evacuate"] * (tags != ["weights"]), "release", *["weights_lost"] * lost]


@pytest.mark.parametrize(
    ("action", "idle", "expected"),
    [
        ("reset_tensors", True, ["interrupt", "check", "weights_lost"]),
        ("reset_tensors", False, ["interrupt"]),
        ("compare", False, ["check"]),
    ],
)
def test_weights_that_the_checker_resets_are_lost(action: str, idle: bool, expected: list[str]) -> None:
    """Samples would go on with random weights. A stock request in flight would leave their KV in the radix tree."""
    calls: list[str] = []
    record = {name: lambda name=name: calls.append(name) for name in ("interrupt", "weights_lost")}
    scheduler = SimpleNamespace(april=SimpleNamespace(**record))
    manager = SimpleNamespace(scheduler=scheduler, is_fully_idle=lambda: idle)
    failed = CheckWeightsReqOutput(success=False, message="failed in the middle")

    def original(*_: Any) -> Any:
        calls.append("check")
        return failed

    output = hooks_control.check_weights(original, manager, CheckWeightsReqInput(action=action))
    assert (output is failed) == ("check" in expected)
    assert "check" in expected or "other requests are in flight" in output.message
    assert calls == expected


@pytest.mark.parametrize("action", ["reset_tensors", "checksum"])
def test_an_open_round_waits_for_the_push_after_a_reset(action: str) -> None:
    """Its reader of the weight lock is released, as after a release of the weights; an audit refuses no reset."""
    calls: list[str] = []

    async def call(name: str) -> str:
        calls.append(name)
        return name

    @asynccontextmanager
    async def paused() -> AsyncIterator[None]:
        await call("paused")
        yield
        await call("audit continues")

    april = SimpleNamespace(audit=SimpleNamespace(paused=paused), released_memory=lambda: call("locks"))
    manager = SimpleNamespace(april=april)
    request = CheckWeightsReqInput(action=action)
    assert asyncio.run(hooks_http.check_weights(lambda *_: call("check"), manager, request)) == "check"
    assert calls == (["paused", "check", "audit continues", "locks"] if action == "reset_tensors" else ["check"])


def test_memory_that_is_released_already_is_not_released_again() -> None:
    """The memory saver ends the scheduler if it is to release a tag twice."""
    calls: list[list[str]] = []
    april: Any = SimpleNamespace(
        rounds=SimpleNamespace(holding_ids=list),
        restored_state=SimpleNamespace(ready=done),
        audit=SimpleNamespace(paused=nullcontext),
        released_memory=lambda: done([tag for tags in calls for tag in tags]),
        released=set(),
    )
    lock = SimpleNamespace(stock=0, writer_lock=nullcontext())
    manager = SimpleNamespace(
        is_pause=False, april=april, model_update_lock=lock, rid_to_state={}, server_args=SimpleNamespace()
    )

    async def release(*tags: str) -> None:
        async def original(_manager: Any, obj: Any, _request: Any) -> None:
            calls.append(obj.tags)

        await hooks_http.release_when_idle(original, manager, SimpleNamespace(tags=list(tags)))

    async def scenario() -> None:
        await release("kv_cache")
        await release("kv_cache")
        await release()
        await release()

    asyncio.run(scenario())
    assert calls == [["kv_cache"], ["cuda_graph", "weights"]]
    assert april.released == {"kv_cache", "cuda_graph", "weights"}


async def done(value: Any = None) -> Any:
    return value


class FakeQueued:
    def __init__(self, april: str | None) -> None:
        self.april, self.to_finish, self.rid = april, None, ""


def test_an_abort_of_another_request_leaves_the_order_of_the_queues() -> None:
    """A sample behind later requests would be overtaken again at every abort."""
    sample, first, second, compiling, other = map(FakeQueued, ("sample", None, None, "sample", None))
    april = SimpleNamespace(attached=SimpleNamespace(abort_named=lambda _: None))
    s: Any = SimpleNamespace(
        april=april,
        waiting_queue=[sample, first, second],
        grammar_manager=SimpleNamespace(grammar_queue=[compiling, other]),
        running_batch=SimpleNamespace(reqs=[]),
        last_batch=None,
        chunked_req=None,
    )

    def aborts_second(scheduler: Any, _: Any) -> None:
        assert sample not in scheduler.waiting_queue
        scheduler.waiting_queue.remove(second)

    hooks_control.abort(aborts_second, s, AbortReq(rid="2"))
    assert s.waiting_queue == [sample, first]
    assert s.grammar_manager.grammar_queue == [compiling, other]
