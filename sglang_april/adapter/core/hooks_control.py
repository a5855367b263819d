"""Scheduler hooks around interruptions: aborts, pushes, flushes, pauses, releases (`suspend-before-interrupt`)."""

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    CheckWeightsReqOutput,
    FlushCacheReqOutput,
    ReleaseMemoryOccupationReqOutput,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.attached import abort_attached
from sglang_april.adapter.core.hooks_scheduler import Process
from sglang_april.adapter.fail_stop import IntendedError
from sglang_april.adapter.shapes.installed import shape
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.state import State

log = logging.getLogger("sglang_april")


def abort(orig: Callable[..., Any], s: Scheduler, recv_req: AbortReq) -> Any:
    """AROUND Scheduler.abort_request: abort_all stops rounds, and a rid never matches their samples (SGLang matches
    prefixes); attached requests are aborted by their whole rid.

    SGLang 0.5.23 also ends requests whose time is up so, with a message, and samples like others.
    """
    timed_out = recv_req.rid if recv_req.abort_message else None

    def spared(req: Req) -> bool:
        return req.april is not None and req.rid != timed_out

    if recv_req.abort_all and not s.april.context.frozen:
        s.april.abort_everything()
    abort_attached(s, recv_req)
    running = [r for r in shape.in_flight(s) if spared(r)]
    before = {r: r.to_finish for r in running}
    queue, grammar = s.waiting_queue, s.grammar_manager.grammar_queue
    s.waiting_queue = [r for r in queue if not spared(r)]
    compiling = list(grammar)
    grammar[:] = [r for r in grammar if not spared(r)]
    try:
        return orig(s, recv_req)
    finally:  # every request keeps its place: behind later ones, a sample would be overtaken at each abort
        left = {*s.waiting_queue, *grammar}
        s.waiting_queue = [r for r in queue if spared(r) or r in left]
        grammar[:] = [r for r in compiling if spared(r) or r in left]
        for req, reason in before.items():
            req.to_finish = reason
        if s.chunked_req is not None and spared(s.chunked_req):
            s._pending_chunked_abort_req = None


def weight_call(orig: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.update_weights_from_*: suspend samples first."""
    controller: Controller = manager.scheduler.april
    controller.interrupt()
    named = named_version(recv_req.weight_version)
    refusal = controller.context.clock.refusal(named)
    if not refusal and recv_req.flush_cache and not shape.may_clear(manager, manager.scheduler):
        refusal = "flush_cache needs an idle engine, and other requests are in flight"
    out = _refused_update(recv_req, refusal) if refusal else _update(orig, manager, recv_req)
    kind = type(recv_req).__name__
    controller.weight_call_ended(
        out.success, f"{kind}: {out.message}", whole="FromDisk" in kind, refused=bool(refusal), named=named
    )
    return out


def _update(orig: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    try:
        with shape.weight_session(manager, recv_req, keep=manager.scheduler.april.context.clock.open):
            return orig(manager, recv_req)
    except WeightsNotReadError as error:
        return _refused_update(recv_req, str(error))


def begin_push(orig: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.begin_weight_update: the calls up to its end are one push."""
    controller: Controller = manager.scheduler.april
    controller.interrupt()
    out = orig(manager, recv_req)
    if out.success:
        controller.session_begun()
    return out


def end_push(orig: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.end_weight_update: the version moves."""
    controller: Controller = manager.scheduler.april
    controller.interrupt()
    out = orig(manager, recv_req)
    problem = controller.session_ended() if out.success else ""
    return type(out)(success=False, message=problem) if problem else out


def record_weight_label(orig: Callable[..., Any], s: Scheduler, new_version: str | None) -> None:
    """AROUND Scheduler.record_weight_version_change (0.5.23): SGLang notes a new label of the weights at each request
    in its batches and queues; attached requests are suspended by then."""
    suspended = s.april.context.ledger.samples(State.SUSPENDED)
    shape.record_label(orig, s, new_version, [(x.request, x.length) for x in suspended if x.request is not None])


def named_version(label: str | None) -> int | None:
    """The policy version that SGLang's `weight_version` names: slime sends the number of its push in every call."""
    return int(label) if label is not None and re.fullmatch("[0-9]{1,15}", label) else None


def _refused_update(recv_req: Any, message: str) -> Any:
    """The output with which SGLang refuses an update, with the reason."""
    output = getattr(io_struct, type(recv_req).__name__.replace("Input", "Output"))
    extra = {"num_paused_requests": 0} if "FromDisk" in output.__name__ else {}
    return output(success=False, message=message, **extra)


class WeightsNotReadError(IntendedError):
    """The weights of a call could not be received on some rank."""


def load_weights(orig: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """AROUND BaseTpWorker.update_weights_from_*: one outcome on all ranks, before SGLang acts on it.

    SGLang lets an exception (a tensor of a wrong shape, an unreadable file) end the scheduler, flushes the cache only
    on the ranks that succeeded, and reports rank 0's outcome.
    """
    try:
        ok, message = orig(worker, *args, **kwargs)
    except Exception as error:
        log.exception("weights could not be loaded")
        ok, message = False, f"{type(error).__name__}: {error}"
    s = Process.scheduler
    return (ok, message) if s is None else _combine_over_ranks(s.tp_cpu_group, ok, message)


def read_weights(orig: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND the functions that receive or decode weights before they are loaded: one outcome on all ranks.

    Raises:
        WeightsNotReadError: on all ranks, if one of them failed.
    """
    weights, ok, message = None, True, ""
    try:
        weights = orig(worker, *args, **kwargs)
    except Exception as error:
        log.exception("weights could not be read")
        ok, message = False, f"{type(error).__name__}: {error}"
    if Process.scheduler is not None:
        ok, message = _combine_over_ranks(Process.scheduler.tp_cpu_group, ok, message)
    if not ok:
        raise WeightsNotReadError(message)
    return weights


def _combine_over_ranks(group: Any, ok: bool, message: str) -> tuple[bool, str]:
    """A failure on any rank is a failure on all. A collective call, outside of scheduling steps."""
    ranks = torch.distributed.get_world_size(group)
    if ranks == 1:
        return ok, message
    outcomes: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(outcomes, (ok, message), group=group)
    failures = [f"rank {rank}: {reason}" for rank, (succeeded, reason) in enumerate(outcomes) if not succeeded]
    return (False, "; ".join(failures)) if failures else (ok, message)


def flush_request(orig: Callable[..., Any], wrapper: Any, recv_req: Any) -> Any:
    """AROUND SchedulerFlushWrapper.handle: samples do not block a flush."""
    s = Process.scheduler
    if s is not None:
        if recv_req.timeout_s and shape.tp_size(s) > 1:
            return FlushCacheReqOutput(success=False, message="flush_cache with a timeout is refused with TP > 1")
        s.april.interrupt()
    return orig(wrapper, recv_req)


def flush(orig: Callable[..., Any], s: Scheduler, *args: Any, **kwargs: Any) -> bool:
    """AROUND Scheduler.flush_cache: evacuate pages before the pools are cleared."""
    if shape.may_clear(s, s):
        s.april.evacuate()
    return orig(s, *args, **kwargs)


def pause(orig: Callable[..., Any], s: Scheduler, recv_req: Any) -> Any:
    """AROUND Scheduler.pause_generation."""
    s.april.freeze()
    return orig(s, recv_req)


def thaw(_result: Any, s: Scheduler, _recv_req: Any) -> None:
    """AFTER Scheduler.continue_generation."""
    s.april.thaw()


def release_memory(orig: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.release_memory_occupation: it unmaps the KV first and flushes second.

    While SGLang's own requests run, it would fail an assertion, which ends the server. In that case nothing is
    released, and the scheduler's state shows this to the HTTP process. The memory saver drops released weights unless
    it has a copy.
    """
    controller: Controller = manager.scheduler.april
    controller.interrupt()
    if not shape.may_clear(manager, manager.scheduler):
        return ReleaseMemoryOccupationReqOutput()
    if not recv_req.tags or "kv_cache" in recv_req.tags:
        controller.evacuate()
    out = orig(manager, recv_req)
    args = shape.resolved(manager.scheduler.server_args)
    kept = not args.enable_memory_saver or args.enable_weights_cpu_backup
    if not kept and (not recv_req.tags or "weights" in recv_req.tags):
        controller.weights_lost()
    return out


def check_weights(orig: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.check_weights: `reset_tensors` fills the weights with random values.

    SGLang's own requests in flight would leave KV of those in the radix tree, under a version that the next push may
    name again. In that case nothing is changed.
    """
    if recv_req.action != "reset_tensors":
        return orig(manager, recv_req)
    controller: Controller = manager.scheduler.april
    controller.interrupt()
    if not manager.is_fully_idle():
        reason = "reset_tensors needs an idle engine, and other requests are in flight"
        return CheckWeightsReqOutput(success=False, message=reason)
    out = orig(manager, recv_req)
    controller.weights_lost()  # also after a failure, which may have come in the middle
    return out
