"""The output of samples in arrays: bytes per token, and equality after every conversion."""

import random
import tracemalloc
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang_april.adapter.core.sample_output import SampleOutput, StreamedOutput

TOKENS, TOP = 5_000, 3


def request(top: int = 0) -> Any:
    """The fields of SGLang's `Req` that hold its output."""
    lists = SimpleNamespace(
        output_token_logprobs_val=[],
        output_token_logprobs_idx=[],
        output_top_logprobs_val=[] if top else None,
        output_top_logprobs_idx=[] if top else None,
    )
    req = SimpleNamespace(output_ids=array("q"), full_untruncated_fill_ids=array("q"), logprob=lists)
    req.april_output = SampleOutput(top)
    return req


def draw(req: Any, tokens: int, seed: int = 0) -> None:
    """As SGLang does after each step; values come from float32 tensors."""
    rng, lists = random.Random(seed), req.logprob
    for _ in range(tokens):
        token, value = rng.randrange(1000, 150_000), float(np.float32(-rng.expovariate(1)))
        req.output_ids.append(token)
        lists.output_token_logprobs_val.append(value)
        lists.output_token_logprobs_idx.append(token)
        if lists.output_top_logprobs_val is not None:
            lists.output_top_logprobs_val.append([value - i for i in range(TOP)])
            lists.output_top_logprobs_idx.append([token + i for i in range(TOP)])
    req.full_untruncated_fill_ids = array("q", req.output_ids)


def test_a_suspended_sample_takes_at_most_12_bytes_per_token() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        reqs = [request() for _ in range(4)]
        for i, req in enumerate(reqs):
            draw(req, TOKENS, i)
        lists = (tracemalloc.get_traced_memory()[0] - before) / (len(reqs) * TOKENS)
        for req in reqs:
            req.april_output.pack(req)
        packed = (tracemalloc.get_traced_memory()[0] - before) / (len(reqs) * TOKENS)
    finally:
        tracemalloc.stop()
    assert lists > 70, "this is what the arrays save"
    assert packed < 12


def test_output_is_the_same_after_any_number_of_suspensions() -> None:
    through, stopped = request(TOP), request(TOP)
    draw(through, 60)
    for leg in range(4):
        part = request(TOP)
        draw(part, 60)
        rows = slice(15 * leg, 15 * (leg + 1))
        stopped.output_ids.extend(part.output_ids[rows])
        for name in vars(stopped.logprob):
            getattr(stopped.logprob, name).extend(getattr(part.logprob, name)[rows])
        if leg % 2:
            stopped.april_output.collect(stopped)  # a record in the journal
        stopped.april_output.pack(stopped)
        assert not stopped.output_ids
        stopped.april_output.unpack(stopped)
        stopped.april_output.unpack(stopped)
    assert stopped.output_ids == through.output_ids
    pairs = [list(zip(v, i, strict=True)) for v, i in zip(
        through.logprob.output_top_logprobs_val, through.logprob.output_top_logprobs_idx, strict=True)]  # fmt: skip
    through.april_output.collect(through)
    for output in (through.april_output, stopped.april_output):
        assert output.logprobs(0, 60) == np.array(request_values(60), "<f4").tobytes()
    assert stopped.april_output.top_logprobs(7, 60) == through.april_output.top_logprobs(7, 60)
    assert np.allclose(stopped.april_output.top_logprobs(0, 60), pairs, rtol=1e-6)
    again = SampleOutput(TOP)
    again.restore(stopped, stopped.april_output.logprobs(0, 60), stopped.april_output.top_logprobs(0, 60))
    assert again.logprobs(3, 60) == stopped.april_output.logprobs(3, 60)
    assert again.top_logprobs(0, 60) == stopped.april_output.top_logprobs(0, 60)


def test_output_of_an_attached_request_stays_in_the_lists_that_sglang_streams() -> None:
    """A record copies it, and a restart puts it back."""
    req = request(TOP)
    req.april_output = StreamedOutput(TOP)
    for _ in range(3):
        draw(req, 20)
        req.april_output.collect(req)
        req.april_output.pack(req)
    lists = req.logprob
    assert (len(req.output_ids), len(lists.output_token_logprobs_val)) == (60, 60)
    again = request(TOP)
    again.output_ids, again.return_logprob, again.april_output = req.output_ids, True, StreamedOutput(TOP)
    logprobs, top = req.april_output.logprobs(0, 60), req.april_output.top_logprobs(0, 60)
    again.april_output.restore(again, logprobs, top)
    assert np.allclose(again.logprob.output_token_logprobs_val, lists.output_token_logprobs_val)
    assert again.logprob.output_token_logprobs_idx == list(req.output_ids)
    assert again.logprob.output_top_logprobs_idx == lists.output_top_logprobs_idx
    assert np.allclose(again.logprob.output_top_logprobs_val, lists.output_top_logprobs_val)
    draw(again, 5)
    again.april_output.collect(again)
    assert len(again.april_output.logprobs(0, 65)) == 4 * 65


def request_values(tokens: int) -> list[float]:
    req = request()
    draw(req, tokens)
    return list(req.logprob.output_token_logprobs_val)


def test_a_sample_without_tokens() -> None:
    req = request()
    req.april_output.pack(req)
    req.april_output.unpack(req)
    assert req.april_output.logprobs(0, 0) == b""
    assert req.april_output.top_logprobs(0, 0) is None
