"""Handlers that connect SGLang's scheduler loop to the controller. `hook_table.py` lists their targets."""

import atexit
import functools
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from sglang.srt.layers import sampler
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter import fail_stop
from sglang_april.adapter.core.accounting import check_accounting
from sglang_april.adapter.core.attached import answer_aborted, described, was_accepted
from sglang_april.adapter.core.calibrate import measure
from sglang_april.adapter.core.engine import SchedulerEngine
from sglang_april.adapter.core.envelope import AprilReq
from sglang_april.adapter.core.request import NO_INPUT_LOGPROBS
from sglang_april.adapter.core.restart import restart
from sglang_april.adapter.core.restore_request import advance_grammar
from sglang_april.adapter.core.step_times import StepTimes
from sglang_april.adapter.core.steps import steps_of
from sglang_april.adapter.shapes.installed import shape
from sglang_april.api import messages
from sglang_april.config import BYTES_PER_GB, load
from sglang_april.kv import cost_model
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.decisions import Decisions
from sglang_april.scheduler.version_clock import VersionClock

log = logging.getLogger("sglang_april")

CHECK = bool(int(os.environ.get("SGLANG_APRIL_CHECK", "0")))
"""Recount the KV pool at every step (set in all tests)."""


COMPARISON_S = 1.0
"""Seconds for which a failed forward waits for reports of decisions that are in transit."""


class Process:
    """The objects of this scheduler process, for handlers that are not passed a scheduler."""

    controller: Controller | None = None
    engine: SchedulerEngine | None = None
    scheduler: Scheduler | None = None
    step_times: StepTimes | None = None
    digest_file: TextIO | None = None
    """In tests: receives the digest of the decisions after every step."""
    sending = threading.Lock()


# --- wiring


def attach(_: None, s: Scheduler) -> None:
    """AFTER Scheduler.init_request_dispatcher."""
    fail_stop.arm(shape.tp_rank(s))
    config = load()
    engine = SchedulerEngine(s, config)
    budgets = engine.budgets
    context = Context(engine, VersionClock(), budgets.host, budgets.disk, budgets.page_tokens)
    context.carry_cap_tokens = config.carry_tokens
    context.attached_kv = config.kv
    context.audited = config.audit > 0
    context.journalled = config.journal is not None
    if config.park_gb is not None:
        context.park_cap_tokens = int(config.park_gb * BYTES_PER_GB) // engine.bytes_per_token
    if shape.tp_size(s) > 1:
        context.decisions = Decisions()
        Process.digest_file = _digest_file(s)
    else:
        sampler.SYNC_TOKEN_IDS_ACROSS_TP = False  # one rank has nothing to agree on, and gloo takes 0.25 ms a step
    if threading.current_thread() is threading.main_thread():
        # A signal to the whole group must not end a scheduler before the HTTP process does. It dies with that process.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    s.april = Process.controller = Controller(context)
    Process.engine, Process.scheduler = engine, s
    Process.step_times = StepTimes(engine.broadcast, s.max_running_requests)
    restart(s, s.april, config, engine.store.disk)
    began = time.monotonic()
    rates = measure(
        s, engine.store, {"host": budgets.host, "disk": budgets.disk}, engine.bytes_per_token // shape.tp_size(s)
    )
    took = time.monotonic() - began
    if rates is not None:
        engine.broadcast.send(rates)
    s._request_dispatcher._mapping[AprilReq] = functools.partial(_receive_message, s.april)
    log.info("april: %s, %d bytes per token, version %d", budgets, engine.bytes_per_token, context.clock.version)
    log.info("april: measured in %.2f s: %s", took, cost_model.report(rates, engine.bytes_per_token))


def _digest_file(s: Scheduler) -> TextIO | None:
    folder = os.environ.get("SGLANG_APRIL_DIGEST")
    return (Path(folder) / f"rank{shape.tp_rank(s)}.log").open("w") if folder else None


@fail_stop.ends_server
def _receive_message(controller: Controller, message: AprilReq) -> None:
    content = messages.decode_message(message.payload)
    if isinstance(content, messages.Observation):
        controller.observe(content)
    else:
        controller.command(content)


def adopt_request(_: None, req: Req, *_args: Any, **_kwargs: Any) -> None:
    """AFTER Req.__init__: the policy version is part of every request's cache key."""
    if Process.engine is not None:
        Process.engine.adopt(req)
    else:
        req.april, req.april_diverted, req.april_base_key = None, False, req.extra_key


# --- the loop


def run_event_loop(orig: Callable[..., Any], s: Scheduler) -> Any:
    """AROUND Scheduler.run_event_loop: a collective of batches that differ may fail before their comparison is done."""
    try:
        return orig(s)
    except Exception:
        if s.april.context.decisions is not None:
            time.sleep(COMPARISON_S)  # the thread that compares ends the server if there is a difference
        raise


def next_batch(orig: Callable[..., Any], s: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """AROUND Scheduler.get_next_batch_to_run: the step boundary."""
    shape.enter_step(s, *args, **kwargs)
    context = s.april.context
    if CHECK:
        check_accounting(s, [x.kv.pages for x in context.ledger.with_kv() if x.kv.pages is not None])
    times = Process.step_times if context.needs_tuning() else None
    if times is not None:
        times.boundary(context.step)
    context.flushing = s.flush_wrapper._pending is not None
    s.april.before_step()
    plan = shape.next_batch(orig, s)
    if times is not None:
        times.launched(context.step, shape.batch_of(plan))
    if context.decisions is not None:
        _compare_decisions(context.step, context.decisions)
    return plan


def _compare_decisions(step: int, decisions: Decisions) -> None:
    """Before the forward: ranks that run different batches would wait for each other forever."""
    if Process.engine is not None:
        Process.engine.broadcast.compare(step, decisions.end_step(step))
    if Process.digest_file is not None:
        Process.digest_file.write(f"{step} {decisions.digest:08x}\n")
        Process.digest_file.flush()


def resume_or_prefill(orig: Callable[..., Any], s: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """AROUND Scheduler.get_new_batch_prefill: stored samples join instead of it; legs in it get their stored KV."""
    shape.enter_prefill(s, *args, **kwargs)
    if s.april.resume():
        return shape.no_prefill(s)
    preemptible = list(s.running_batch.reqs) if s.april.context.engine.preempts else []
    plan = shape.prefill(orig, s)
    if preemptible and shape.batch_of(plan) is None:
        _queue_forgotten(s, preemptible)
    if s.april.context.ledger.runs and (batch := shape.batch_of(plan)) is not None:
        _launch_legs(s.april, batch)
    return plan


def _queue_forgotten(s: Scheduler, before: list[Req]) -> None:
    """Queue the requests of `before` that SGLang has preempted in vain: when the request that they were preempted for
    does not fit, it leaves them in no queue. With a prefill it queues them itself."""
    if retracted := [req for req in before if req.is_retracted and not req.finished()]:
        known = {*s.running_batch.reqs, *s.waiting_queue}
        for req in retracted:
            if req not in known:
                s._add_request_to_queue(req)


def _launch_legs(controller: Controller, batch: ScheduleBatch) -> None:
    for req in batch.reqs:
        sample = req.april
        if sample is not None and sample.attached and sample.kv.pages is not None and not sample.length:
            controller.launched(sample, on_kv=req.april_prefix is sample.kv.pages)


def sleep_on_idle(orig: Callable[..., Any], s: Scheduler) -> None:
    """AROUND Scheduler.maybe_sleep_on_idle: samples that can start are in none of SGLang's queues."""
    if not s.april.has_work():
        orig(s)


def count_finishes(_: None, s: Scheduler, batch: ScheduleBatch, _result: Any) -> None:
    """AFTER Scheduler.process_batch_result."""
    if s.april.context.ledger.runs and (steps := steps_of(_rows_to_count(s.april, batch))):
        s.april.progress(steps)


def _rows_to_count(controller: Controller, batch: ScheduleBatch) -> Iterable[tuple[Req, int]]:
    """With the tokens that were prefilled for them."""
    if batch.forward_mode.is_extend():
        return zip(batch.reqs, batch.extend_lens or itertools.repeat(0), strict=False)
    everyone = controller.counts_all()
    return [(req, 0) for req in batch.reqs if everyone or req.finished_reason is not None]


def divert_outputs(orig: Callable[..., Any], streamer: Any, reqs: list[Req], *args: Any, **kwargs: Any) -> Any:
    """AROUND SchedulerOutputStreamer.stream_output: outputs of samples are sent in a separate message, and the answers
    to attached requests contain their descriptions."""
    rest = [req for req in reqs if not req.april_diverted]  # of the whole batch, in every step
    finished = [req for req in reqs if req.finished_reason is not None and req.april is not None]
    ended = [req for req in finished if req.april.attached and not req.finished_output]
    for req in finished:
        if not req.april.attached:
            req.finished_output = True
    if reqs and not rest:
        return None
    if not ended or Process.controller is None:
        return orig(streamer, rest, *args, **kwargs)
    with described(Process.controller.attached, ended):
        return orig(streamer, rest, *args, **kwargs)


def add_held_tokens(result: int, _observer: Any) -> int:
    """AFTER SchedulerPoolStatsObserver.session_held_tokens: SGLang's leak check counts pages of partials."""
    controller, engine = Process.controller, Process.engine
    if controller is None or engine is None:
        return result
    pages = (x.kv.pages for x in controller.context.ledger.with_kv())
    return result + sum(engine.held_tokens(p) for p in pages if p is not None)


def close_journal(_: None, s: Scheduler, _recv_req: Any) -> None:
    """AFTER Scheduler.handle_shutdown: the loop ends after this step."""
    s.april.context.recorder.close()
    atexit.register(os._exit, 0)  # the interpreter's own end frees all modules, which takes seconds of CPU time


# --- requests that SGLang aborts or retracts


def renew_cache_key(orig: Callable[..., Any], s: Scheduler, req: Req, is_retracted: bool = False) -> Any:
    """AROUND Scheduler._add_request_to_queue: a request without KV gets the current version in its key."""
    if Process.controller is not None and Process.engine is not None:
        _on_queued(Process.controller, Process.engine, req, is_retracted)
    if not was_accepted(req):
        return orig(s, req, is_retracted)
    limit, s.max_queued_requests = s.max_queued_requests, None
    try:
        return orig(s, req, is_retracted)
    finally:
        s.max_queued_requests = limit


def _on_queued(controller: Controller, engine: SchedulerEngine, req: Req, is_retracted: bool) -> None:
    """Samples request no input logprobs: in a recompute the default would run the lm_head over all old tokens.

    SGLang passes `is_retracted=False` for requests that were preempted by priority.
    """
    if not shape.has_kv(req):
        engine._renew(req)
        if req.april is not None:
            req.skip_radix_cache_insert = False
            if not req.april.attached or req.output_ids:
                req.logprob_start_len = NO_INPUT_LOGPROBS
            if req.april.journal.snapshot is not None:
                advance_grammar(req)
                req.april.journal.snapshot = None
    if req.april is not None and (is_retracted or (req.is_retracted and not req.april.recompute.in_progress)):
        controller.retracted(req.april)


def intercept_queue_abort(orig: Callable[..., Any], sender: Any, output: Any, recv_obj: Any = None) -> Any:
    """AROUND SenderWrapper.send_output: aborts that bypass `process_batch_result`. Called on every rank.

    The lock is needed because the journal's writer thread uses the same socket.
    """
    sample = getattr(recv_obj, "april", None) if isinstance(output, AbortReq) else None
    if sample is not None and Process.controller is not None:
        reason = output.finished_reason or {"type": "abort", "message": "aborted by the engine"}
        passes_on = sample.attached
        if sample.attached and recv_obj.output_ids and Process.scheduler is not None:
            # No `AbortReq` reaches the detokenizer, which would add the old text to the next request of this `rid`.
            answer_aborted(Process.scheduler, recv_obj, reason)
            passes_on = False
        Process.controller.aborted(sample, reason)
        if not passes_on:
            return None
    with Process.sending:
        return orig(sender, output, recv_obj)
