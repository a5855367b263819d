"""Attention over packed sequences without TransformerEngine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.tiny_model import make
from tests.bridge.two_steps import check_step, check_weights, settings, train_two_steps
from trainer_bridge.megatron.model import PackedAttention
from trainer_bridge.megatron.worker_group import make_trainer

HEADS, KV_HEADS, HEAD_DIM, LENGTHS = 4, 2, 16, (5, 1, 9)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    ends = functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).to(torch.int32)
    packed: Any = SimpleNamespace(cu_seqlens_q=ends)
    return PackedAttention.forward(torch.nn.Module(), query, key, value, None, packed_seq_params=packed)  # type: ignore[arg-type]


def test_a_fused_backend_takes_the_shapes() -> None:
    """Without one, the scores of a response of 16k tokens take gigabytes per layer."""
    query, key, value = (torch.randn(sum(LENGTHS), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        fused = attend(query, key, value)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(fused, attend(query, key, value))
    assert fused.shape == (sum(LENGTHS), HEADS * HEAD_DIM)


def test_recompute_gives_the_same_steps_and_keeps_less(tmp_path: Path) -> None:
    """Layers save their inputs for the backward pass, and nothing else."""
    make(tmp_path / "model", dtype="float32")
    taken, saved = [], []
    for granularity in (None, "full"):
        trainer = make_trainer(settings(tmp_path / "model", recompute_granularity=granularity))
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            taken.append(train_two_steps(trainer, tmp_path / str(granularity)))
        saved.append(sum(sizes))
        trainer.close()
    for got, expected in zip(taken[1].reports, taken[0].reports, strict=True):
        check_step(got, expected)
    check_weights(taken[1].weights[-1], taken[0].weights[-1])
    assert saved[1] < saved[0]
