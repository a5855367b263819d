"""Builds SGLang's request for a sample, and the result of a finished request."""

import secrets
from array import array
from typing import Any

import msgspec
import numpy as np
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_april.adapter.core.attached import was_refused
from sglang_april.adapter.core.encoded_params import decode_params
from sglang_april.adapter.core.proximal import proximal_logprobs
from sglang_april.adapter.core.sample_output import SampleOutput
from sglang_april.api.messages import FinishedSample
from sglang_april.scheduler.state import Group, Sample

NO_INPUT_LOGPROBS = -1


def versioned_key(base: str | None, version: int) -> str:
    """Cache key of a request: KV of one policy version is never a prefix under another (`no-mixed-version-prefix`)."""
    return f"{base or ''}|v{version}"


RESERVED_RID = "april."
"""Prefix of the `rid` of samples. Requests with it are refused at the front end."""
_PROCESS = secrets.token_hex(8)


def rid_of(sample: Sample) -> str:
    """A `rid` that no other request has, because part of it never leaves this process. Samples are
    identified by `Req.april`, never by `rid`."""
    return f"{RESERVED_RID}{_PROCESS}.{sample.group.gid}.{sample.index}"


def build_request(sample: Sample) -> TokenizedGenerateReqInput:
    """A request for a sample that has none. `restore_tokens` adds the tokens of earlier legs to it."""
    group = sample.group
    params = msgspec.structs.replace(params_of(group), sampling_seed=sample.seed)
    if group.prompt.max_new_tokens is not None:
        params.max_new_tokens = group.prompt.max_new_tokens[sample.index]
    return TokenizedGenerateReqInput(
        rid=rid_of(sample),
        input_text="",
        input_ids=_input_ids(group),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=NO_INPUT_LOGPROBS,
        top_logprobs_num=group.prompt.top_logprobs_num,
        token_ids_logprob=None,
        stream=False,
        priority=group.prompt.priority,
    )


def _input_ids(group: Group) -> "array[int]":
    """int64 [prompt_len], one array for the group: SGLang replaces the prompt of a request, but never changes it."""
    if group.engine_input_ids is None:
        ids = np.frombuffer(group.prompt.input_ids, dtype="<i4").astype(np.int64)
        group.engine_input_ids = array("q", ids.tobytes())
    return group.engine_input_ids


def has_grammar(group: Group) -> bool:
    """Whether outputs must follow a grammar, which SGLang compiles while the request waits for its prefill."""
    params = params_of(group)
    return any(x is not None for x in (params.json_schema, params.regex, params.ebnf, params.structural_tag))


def params_of(group: Group) -> SamplingParams:
    """The group's sampling parameters, decoded once. Do not modify them."""
    if group.engine_params is None:
        group.engine_params = decode_params(group.params)
    return group.engine_params


def result_of(sample: Sample, req: Req | None, reason: dict[str, Any] | None) -> FinishedSample:
    """Tokens and logprobs of a sample that has ended; a sample that never reached the engine has none."""
    ids = req.output_ids_through_stop if req is not None else array("q")
    if req is not None and was_refused(req):
        ids = ids[:-1]
    sample.length = len(ids)
    output = req.april_output if req is not None else SampleOutput()
    if req is not None:
        output.collect(req)
    logprobs = output.logprobs(0, len(ids))
    if reason is None:
        reason = req.finished_reason.to_json() if req is not None and req.finished_reason else {"type": "abort"}
    group = sample.group
    proximal = proximal_logprobs(sample, len(ids), np.frombuffer(logprobs, "<f4"))
    return FinishedSample(
        run=group.run.name,
        id=group.id,
        incarnation=group.incarnation,
        index=sample.index,
        output_ids=np.asarray(ids, dtype="<i4").tobytes(),
        logprobs=logprobs,
        spans=sample.closed_spans(),
        finish_reason=reason,
        seed=sample.seed,
        top_logprobs=output.top_logprobs(0, len(ids)),
        proximal_logprobs=proximal[0].tobytes() if proximal else None,
        proximal_version=proximal[1] if proximal else None,
    )
