"""Hooks in the scheduler process around what interrupts a round (S2): aborts, pushes, flushes, pauses, releases."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqOutput
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.hooks_scheduler import Process, guarded
from sglang_april.scheduler.controller import Controller


def abort(orig: Callable[..., Any], s: Scheduler, recv_req: AbortReq) -> Any:
    """AROUND Scheduler.abort_request: of everything = stop our rounds; by rid = never ours (stock matches prefixes)."""
    if recv_req.abort_all and not s.april.context.frozen:
        _abort_everything(s.april)
    ours = [r for r in [*s.waiting_queue, *s.grammar_manager.grammar_queue] if r.april is not None]
    running = [r for b in (s.running_batch, s.last_batch) if b is not None for r in b.reqs if r.april is not None]
    before = {r: r.to_finish for r in running}
    queue, grammar = s.waiting_queue, s.grammar_manager.grammar_queue
    s.waiting_queue = [r for r in queue if r.april is None]
    grammar[:], kept = [r for r in grammar if r.april is None], [r for r in grammar if r.april is not None]
    try:
        return orig(s, recv_req)
    finally:
        s.waiting_queue += [r for r in queue if r in ours]
        grammar += kept
        for req, reason in before.items():
            req.to_finish = reason
        if s.chunked_req is not None and s.chunked_req.april is not None:
            s._pending_chunked_abort_req = None


@guarded
def _abort_everything(controller: Controller) -> None:
    controller.abort_everything()


def weight_call(orig: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.update_weights_from_*: our samples are out before the stock body runs."""
    controller = manager.scheduler.april
    controller.suspender.suspend_all()
    kind = type(recv_req).__name__
    if recv_req.flush_cache and not manager.is_fully_idle():
        out = _refused_update(recv_req, "flush_cache needs an idle engine, and other requests are in flight")
    else:
        out = orig(manager, recv_req)
    ok = _all_ranks(manager.tp_cpu_group, out.success)
    if out.success and not ok:
        out.success, out.message = False, f"{kind} failed on another rank"
    controller.weight_call_ended(ok, f"{kind}: {out.message}", whole="FromDisk" in kind)
    return out


def _refused_update(recv_req: Any, message: str) -> Any:
    output = getattr(io_struct, type(recv_req).__name__.replace("Input", "Output"))
    extra = {"num_paused_requests": 0} if "FromDisk" in output.__name__ else {}
    return output(success=False, message=message, **extra)


def _all_ranks(group: Any, ok: bool) -> bool:
    """A control message over the TP group, not a scheduling step: did it succeed on every rank?"""
    flag = torch.tensor([int(ok)], dtype=torch.int32)
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=group)
    return bool(flag.item())


def flush_request(orig: Callable[..., Any], wrapper: Any, recv_req: Any) -> Any:
    """AROUND SchedulerFlushWrapper.handle: our samples do not stand in a flush's way."""
    s = Process.scheduler
    if s is not None:
        if recv_req.timeout_s and s.ps.tp_size > 1:
            return FlushCacheReqOutput(success=False, message="flush_cache with a timeout is refused with TP > 1")
        s.april.suspender.suspend_all()
    return orig(wrapper, recv_req)


def flush(orig: Callable[..., Any], s: Scheduler, *args: Any, **kwargs: Any) -> bool:
    """AROUND Scheduler.flush_cache: pages move out before the pools are cleared."""
    if s.is_fully_idle():
        s.april.suspender.evacuate()
    return orig(s, *args, **kwargs)


def pause(orig: Callable[..., Any], s: Scheduler, recv_req: Any) -> Any:
    """AROUND Scheduler.pause_generation."""
    s.april.freeze()
    return orig(s, recv_req)


def unpause(_result: Any, s: Scheduler, _recv_req: Any) -> None:
    """AFTER Scheduler.continue_generation."""
    s.april.thaw()


def release_memory(orig: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.release_memory_occupation: it unmaps the KV first and flushes second."""
    controller = manager.scheduler.april
    controller.suspender.suspend_all()
    if not recv_req.tags or "kv_cache" in recv_req.tags:
        controller.suspender.evacuate()
    return orig(manager, recv_req)
