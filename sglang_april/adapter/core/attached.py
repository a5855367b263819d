"""Requests of SGLang's own routes that belong to a run: in the scheduler (`attached-request`).

SGLang creates, queues, answers and aborts them. `Req.april` is their sample, so that the controller can suspend and
resume them like any other.
"""

from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, BaseFinishReason, Req
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.attach_request import DESCRIPTION, attachment_of, seed_of, without_keys
from sglang_april.adapter.shapes.installed import shape
from sglang_april.api.messages import EndedRequest
from sglang_april.http.prepare import Params, rescore
from sglang_april.scheduler.attached import Attached
from sglang_april.scheduler.state import Sample, State


def begin_attached(orig: Callable[..., Any], s: Scheduler, recv_req: TokenizedGenerateReqInput) -> Any:
    """AROUND Scheduler.handle_generate_request: a request that names a run becomes a sample of it."""
    attachment = attachment_of(recv_req.sampling_params.custom_params)
    if attachment is None:
        return orig(s, recv_req)
    attached = s.april.attached
    if reason := attached.refusal(*attachment):
        refusal = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": reason}  # streams want the enum
        attached.refused(recv_req.rid)
        return s.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=recv_req.rid, finished_reason=refusal), None)
    run, trajectory, group = attachment
    if not recv_req.return_logprob:  # these two have no effect then, as in SGLang
        recv_req.logprob_start_len, recv_req.top_logprobs_num = -1, 0
    recv_req.return_logprob |= trajectory is not None  # for the record; the caller gets what it asked for
    ids = _prompt(s, recv_req)
    params = recv_req.sampling_params
    if params.sampling_seed is None:
        params.sampling_seed = seed_of(params.custom_params, trajectory or recv_req.rid, ids)
    asked = _params(recv_req) if s.april.context.journalled else b""
    sample = attached.begin(run, recv_req.rid, ids, asked, trajectory, group)
    # SGLang adds the request itself to a dict here: a cycle that keeps all that it holds until a garbage collection.
    params.custom_params = without_keys(params.custom_params)
    if s.april.context.audited:
        sample.group.prompt.rescore = _rescore(s, recv_req)
    s.april.context.engine.create(sample, lambda: orig(s, recv_req))
    if sample.journal.answered is not None and sample.request is not None:
        _answer_again(s, sample)
    elif sample.state is State.RUNNING and sample.request is not None and sample.request.to_finish is None:
        attached.created(sample)
    return None


def _prompt(s: Scheduler, recv_req: TokenizedGenerateReqInput) -> bytes:
    """The prompt that the model gets, int32: under `--allow-auto-truncate`, SGLang will leave out what is too long."""
    ids = recv_req.input_ids
    if len(ids) > s.max_req_input_len and shape.resolved(s.server_args).allow_auto_truncate:
        ids = ids[: s.max_req_input_len]
    return array("i", ids).tobytes()


def _params(recv_req: TokenizedGenerateReqInput) -> bytes:
    """What a restarted server compares to recognize a repeated request.

    Empty where it could not be answered from the journal, which has no logprobs of the prompt.
    """
    if recv_req.return_logprob and recv_req.logprob_start_len >= 0:
        return b""
    asked = (recv_req.sampling_params, recv_req.return_logprob, recv_req.top_logprobs_num)
    return msgspec.msgpack.encode(asked, order="deterministic")


def _rescore(s: Scheduler, recv_req: TokenizedGenerateReqInput) -> float | str:
    """The temperature at which the audit rescores the request, or why it does not."""
    if recv_req.require_reasoning and shape.resolved(s.server_args).enable_strict_thinking:
        return "thinking_budget"
    return rescore(Params(0, msgspec.structs.asdict(recv_req.sampling_params)))


class SavedReason(BaseFinishReason):
    """Why an earlier server has finished a request."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self._saved = saved

    def to_json(self) -> dict[str, Any]:
        """The finish reason as the earlier server sent it."""
        return self._saved


def _answer_again(s: Scheduler, sample: Sample) -> None:
    """Answer a request that an earlier server has answered, with the tokens that it has."""
    s.april.suspender.suspend_now([sample])
    req, answer = sample.request, sample.journal.answered
    if req is None or answer is None:  # SGLang has refused it
        return
    req.april_output.unpack(req)
    req.finished_reason = SavedReason(answer.finish_reason)
    s.output_streamer.stream_output([req], req.return_logprob)
    s.april.attached.end([sample])


class DescribedReason(BaseFinishReason):
    """A finish reason with the description of the request, in SGLang's types: strings and numbers."""

    def __init__(self, reason: BaseFinishReason, description: EndedRequest) -> None:
        self.reason = reason
        self._description = msgspec.json.encode(description).decode()

    def to_json(self) -> dict[str, Any]:
        """As SGLang sends it."""
        return {**self.reason.to_json(), DESCRIPTION: self._description}


@contextmanager
def described(attached: Attached, reqs: list[Req]) -> Iterator[None]:
    """While SGLang answers attached requests that have finished, the answers contain their descriptions.

    The HTTP process then receives no message of its own for each. The answer of a leg waits for its record, which
    describes it.
    """
    alone = [req for req in reqs if req.april.group.leg is None]
    for req in alone:
        description = attached.description(req.april, len(req.output_ids_through_stop))
        req.finished_reason, req.april_described = DescribedReason(req.finished_reason, description), True
    yield
    for req in alone:
        req.finished_reason = req.finished_reason.reason


def queue_attached(s: Scheduler, req: Req) -> None:
    """Queue a request again that left SGLang's queues; the compilation of a pending grammar is requested again."""
    if isinstance(req.grammar, Future):
        req.grammar = None
    if req.grammar is not None or not s.grammar_manager.process_req_with_grammar(req):
        s._add_request_to_queue(req)


def was_accepted(req: Req) -> bool:
    """Whether the request has passed admission: the limit of SGLang's queue is for requests that arrive, and would end
    samples that are admitted together, or whose KV is computed again."""
    sample = req.april
    return sample is not None and not sample.arriving


def was_refused(req: Req) -> bool:
    """Whether SGLang answers 400 after a forward, whose token is then not part of the answer.

    The forward was of one token in place of the prompt (`set_finish_with_abort`), or a stop regex is invalid.
    """
    reason = req.finished_reason or req.to_finish
    reason = reason.reason if isinstance(reason, DescribedReason) else reason
    return isinstance(reason, FINISH_ABORT) and reason.status_code == HTTPStatus.BAD_REQUEST


def abort_attached(s: Scheduler, recv_req: AbortReq) -> None:
    """Answer the attached requests that an abort names with the tokens that they have.

    They are taken out of SGLang's queues and batches first. SGLang itself would match `rid` as a prefix, forget the
    tokens of a request that waits for a prefill, and answer a running one after its next step, which a pause delays.
    """
    s.april.attached.abort_named(lambda req: recv_req.abort_all or req.rid == recv_req.rid)


def answer_aborted(s: Scheduler, req: Req, reason: dict[str, Any] | None = None) -> None:
    """Answer a request that is in no queue and no batch, with the tokens that it has.

    Args:
        reason: SGLang's finish reason, if the request has tokens.
    """
    req.april_output.unpack(req)
    if not req.output_ids:
        s.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), None)
        return
    stats = req.time_stats
    stats.forward_entry_time = stats.forward_entry_time or stats.last_forward_entry_time  # a suspend has set it to 0
    reason = reason or {}
    req.finished_reason = FINISH_ABORT(reason.get("message"), reason.get("status_code"), reason.get("err_type"))
    s.output_streamer.stream_output([req], req.return_logprob)
