"""CUDA memory handles in weight calls, with PyTorch's reduction of CUDA tensors replaced: this machine has none."""

import base64
import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from trainer_bridge.push.tensor import DEVICE_ARGUMENT, TensorTransport

UUIDS = ["GPU-a", "GPU-b"]
mapped: Counter[int] = Counter()
"""By memory block: how many processes still have to map it. PyTorch frees a block when this is 0."""


class OnGpu(torch.Tensor):
    """A tensor that reports a GPU as its device."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def reduce(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    block = id(tensor)
    mapped[block] += 1
    return rebuild, (*[None] * DEVICE_ARGUMENT, 1, block)


def rebuild(*args: Any) -> str:
    mapped[args[-1]] -= 1
    assert mapped[args[-1]] >= 0, "mapped more often than it was sent"
    return str(args[DEVICE_ARGUMENT])


def test_every_rank_gets_handles_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines, of two ranks and one: each rank deserialises its own payload, and every count returns to zero."""
    mapped.clear()
    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=UUIDS[i]))
    devices: list[str] = []

    def engine(ranks: int) -> Any:
        def weight_call(_path: str, body: dict[str, Any]) -> None:
            assert len(body["serialized_named_tensors"]) == ranks
            for payload in body["serialized_named_tensors"]:
                devices.extend(device for _, device in pickle.loads(base64.b64decode(payload)))

        return SimpleNamespace(info=SimpleNamespace(tp_size=ranks), weight_call=weight_call)

    tensors = [torch.zeros(4).as_subclass(OnGpu) for _ in range(2)]
    bucket: Any = SimpleNamespace(views=lambda: [(str(i), x) for i, x in enumerate(tensors)])
    transport = TensorTransport([engine(2), engine(1)])
    transport.send(bucket)
    transport.close()
    assert devices == ["GPU-b"] * 6
    assert len(mapped) == 2
    assert not any(mapped.values()), "memory that is never freed"
