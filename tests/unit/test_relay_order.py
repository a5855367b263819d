"""The input of a resumed sample's first step, on streams that run as late as a GPU's may."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_april.adapter.core import page_pool
from tests.support.delayed_relay import delay

SLOT, FOREIGN, OWN = 3, 111, 222


@pytest.fixture
def scheduler() -> Any:
    """The overlap loop's relay and streams, without a model."""
    pool = SimpleNamespace(req_to_token=torch.zeros(8, 16))
    made = SimpleNamespace(
        enable_overlap=True,
        device="cpu",
        future_map=FutureMap(torch.device("cpu"), SpeculativeAlgorithm.NONE, pool),
        forward_stream=torch.cpu.Stream(),
        schedule_stream=torch.cpu.Stream(),
    )
    made.forward_stream_ctx = torch.cpu.stream(made.forward_stream)
    delay(None, made)
    return made


def test_slot_of_a_request_that_ended_in_the_forward_in_flight(scheduler: Any) -> None:
    slots = torch.tensor([SLOT])
    with scheduler.forward_stream_ctx:  # the forward in flight still has the request that had the slot before
        scheduler.future_map.stash(slots, RelayPayload(bonus_tokens=torch.tensor([FOREIGN])))
    page_pool._relay(scheduler, slots, torch.tensor([OWN]))
    with scheduler.forward_stream_ctx:  # the next forward reads its inputs
        assert scheduler.future_map.output_tokens_buf[SLOT] == OWN


class GpuTensor:
    """Records the streams on which its memory is used."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_on_a_gpu_the_forward_stream_keeps_the_memory_that_it_reads(scheduler: Any) -> None:
    """The write is queued there; the schedule stream, on which the tensors were made, may be done with them before."""
    slots, tokens = GpuTensor(), GpuTensor()
    stashed: list[Any] = []
    scheduler.future_map = SimpleNamespace(stash=lambda *args: stashed.append(args))
    page_pool._relay(scheduler, slots, tokens)  # type: ignore[arg-type]
    assert (stashed[0][0], stashed[0][1].bonus_tokens) == (slots, tokens)
    assert slots.streams == tokens.streams == [scheduler.forward_stream]


def test_on_a_gpu_the_delay_is_left_to_the_stream() -> None:
    """A call that `delay` runs later would run on the stream that is current then."""
    context, stash = object(), object()
    gpu: Any = SimpleNamespace(enable_overlap=True, device="cuda", forward_stream_ctx=context)
    gpu.future_map = SimpleNamespace(stash=stash)
    delay(None, gpu)
    assert gpu.forward_stream_ctx is context
    assert gpu.future_map.stash is stash
