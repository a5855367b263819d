"""The output of samples in arrays: bytes per token, and equality after every conversion."""

import random
import tracemalloc
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_april.adapter.core.sample_output import SampleOutput, StreamedOutput

TOKENS, TOP = 5_000, 3


def request(top: int = 0, output: type[SampleOutput] = SampleOutput) -> Any:
    """The fields of SGLang's `Req` that hold its output."""
    lists = SimpleNamespace(
        output_token_logprobs_val=[],
        output_token_logprobs_idx=[],
        output_top_logprobs_val=[] if top else None,
        output_top_logprobs_idx=[] if top else None,
    )
    req = SimpleNamespace(output_ids=array("q"), full_untruncated_fill_ids=array("q"), logprob=lists)
    req.return_logprob, req.surr_offset, req.surr_and_decode_ids = True, 0, array("q")
    req.april_output = output(top)
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
    if isinstance(req.april_output, StreamedOutput):
        req.surr_and_decode_ids = array("q", req.output_ids)


@pytest.mark.parametrize("output", [SampleOutput, StreamedOutput])
def test_a_suspended_sample_takes_at_most_12_bytes_per_token(output: type[SampleOutput]) -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        reqs = [request(output=output) for _ in range(4)]
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
        append(stopped, part, slice(15 * leg, 15 * (leg + 1)))
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


def test_output_of_an_attached_request_returns_to_the_lists_that_sglang_streams() -> None:
    """After each suspend, and after a restart."""
    through, req = request(TOP), request(TOP, StreamedOutput)
    draw(through, 60)
    draw(req, 20)
    for leg in range(4):
        if leg % 2:
            req.april_output.collect(req)  # a record in the journal
        req.april_output.pack(req)
        lists = vars(req.logprob).values()
        assert not any(map(len, [req.output_ids, req.full_untruncated_fill_ids, req.surr_and_decode_ids, *lists]))
        assert req.surr_offset is None, "SGLang builds what it decodes again"
        req.april_output.collect(req)
        req.april_output.unpack(req)
        req.april_output.unpack(req)
        if leg < 2:
            append(req, through, slice(20 * (leg + 1), 20 * (leg + 2)))
    assert req.output_ids == through.output_ids
    assert_lists_equal(req, through)
    again = request(TOP, StreamedOutput)
    again.output_ids = req.output_ids
    req.april_output.collect(req)
    again.april_output.restore(again, req.april_output.logprobs(0, 60), req.april_output.top_logprobs(0, 60))
    assert_lists_equal(again, through)
    draw(again, 5)
    again.april_output.collect(again)
    assert len(again.april_output.logprobs(0, 65)) == 4 * 65


def test_an_attached_request_without_logprobs_has_no_lists() -> None:
    req = request(output=StreamedOutput)
    draw(req, 20)
    req.return_logprob, req.logprob = False, SimpleNamespace(**dict.fromkeys(vars(req.logprob)))
    ids = array("q", req.output_ids)
    req.april_output.pack(req)
    req.april_output.unpack(req)
    assert req.output_ids == ids
    assert set(vars(req.logprob).values()) == {None}


def append(req: Any, drawn: Any, rows: slice) -> None:
    """What another request has drawn, as SGLang appends it."""
    req.output_ids.extend(drawn.output_ids[rows])
    for name in vars(req.logprob):
        getattr(req.logprob, name).extend(getattr(drawn.logprob, name)[rows])


def assert_lists_equal(req: Any, expected: Any) -> None:
    assert req.logprob.output_token_logprobs_val == expected.logprob.output_token_logprobs_val
    assert req.logprob.output_token_logprobs_idx == expected.logprob.output_token_logprobs_idx
    assert req.logprob.output_top_logprobs_idx == expected.logprob.output_top_logprobs_idx
    assert np.allclose(req.logprob.output_top_logprobs_val, expected.logprob.output_top_logprobs_val)


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
