"""Writes a sample's output to the journal, and restores it into a new request after a restart.

A new request has no output. The tokens of earlier legs are added before SGLang processes it, so that its prefill is
that of a retracted request. Its grammar is advanced past those tokens once SGLang has compiled it.
"""

from array import array
from collections.abc import Callable

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.request import versioned_key
from sglang_april.adapter.core.sample_output import SampleOutput
from sglang_april.recovery.journal_snapshot import Chunk
from sglang_april.scheduler.state import Proximal, Sample


def chunk_of(sample: Sample, start: int) -> Chunk:
    """Output tokens of an unfinished sample, from index `start`."""
    req: Req = sample.request
    output: SampleOutput = req.april_output
    output.collect(req)
    proximal = sample.recompute.proximal
    if proximal is not None and proximal.version == sample.journal.proximal_version:
        proximal = None
    return Chunk(
        np.asarray(req.output_ids[start : sample.length], dtype="<i4").tobytes(),
        output.logprobs(start, sample.length),
        sample.closed_spans(),
        output.top_logprobs(start, sample.length),
        _serialize_proximal(proximal) if proximal is not None else None,
    )


def _serialize_proximal(proximal: Proximal) -> tuple[int, list[tuple[int, bytes]]]:
    """Version and (first token, float32 bytes) of each part; one copy from the device for all parts."""
    if not proximal.parts:
        return proximal.version, []
    values = torch.cat([part for _, part in proximal.parts]).float().cpu().numpy().astype("<f4")
    ends = np.cumsum([len(part) for _, part in proximal.parts])
    firsts = [first for first, _ in proximal.parts]
    return proximal.version, [(i, v.tobytes()) for i, v in zip(firsts, np.split(values, ends[:-1]), strict=True)]


def restore_tokens(req: Req, sample: Sample, chunk: Chunk) -> None:
    """Add the tokens of earlier legs to a new request."""
    ids = np.frombuffer(chunk.output_ids, "<i4")
    req.output_ids = array("q", ids.astype(np.int64).tobytes())
    req.april_output.restore(req, chunk.logprobs, chunk.top_logprobs)
    if chunk.proximal is not None:
        version, parts = chunk.proximal
        values = [(first, torch.from_numpy(np.frombuffer(raw, "<f4").copy())) for first, raw in parts]
        sample.recompute.proximal, sample.journal.proximal_version = Proximal(version, values), version


Create = Callable[[Sample], None]
"""Lets SGLang create the request of a sample and add it to its waiting queue."""


def restore_request(s: Scheduler, create: Create, sample: Sample) -> bool:
    """Create the request of a sample whose KV was recovered; False, without any change, if SGLang refuses it."""
    pages, tokens = sample.kv.pages, sample.journal.snapshot
    assert pages is not None
    req = make_request(s, create, sample)
    if req is None:
        sample.journal.snapshot = tokens
        return False
    pages.extra_key = versioned_key(req.april_base_key, sample.kv.version)
    return True


def make_request(s: Scheduler, create: Create, sample: Sample) -> Req | None:
    """A request that needs no prefill, created by SGLang; None, without any change, if SGLang refuses it.

    The waiting queue is replaced by an empty one meanwhile, so that no other request is moved or aborted.
    """
    queue, s.waiting_queue = s.waiting_queue, []
    try:
        create(sample)
    finally:
        queued, s.waiting_queue = s.waiting_queue, queue
    req: Req | None = sample.request
    if req is None or queued != [req] or req.to_finish is not None:
        sample.request = None
        return None
    return req


def advance_grammar(req: Req) -> None:
    """Advance the grammar of a restored request, once compiled, past the tokens of earlier legs.

    A grammar that does not accept them ends the request, as one does that SGLang advances.
    """
    if req.grammar is None:
        return
    try:
        for token in req.output_ids:
            req.grammar.accept_token(token)
    except ValueError as error:
        req.to_finish = FINISH_ABORT(f"the grammar does not accept the tokens before the restart: {error}")
