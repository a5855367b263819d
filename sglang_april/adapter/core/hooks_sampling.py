"""Handlers around sampling: per-row seeds, and penalties of resumed samples."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_april.adapter.core.penalties import replay_penalties
from sglang_april.adapter.core.sampler import RowSeeds, draw


def sampling_info(result: Any, _cls: type, batch: ScheduleBatch, _vocab_size: int) -> None:
    """AFTER SamplingBatchInfo.from_schedule_batch: per-row seeds, and penalties of resumed samples."""
    result.april = RowSeeds.of(batch)
    prefill = batch.forward_mode is not None and batch.forward_mode.is_extend()
    rows = [i for i, r in enumerate(batch.reqs) if r.april is not None and r.output_ids]
    replay_penalties(batch, result, rows, prefill=prefill)


def sampling_filter(_: None, info: Any, keep_indices: list[int], keep_indices_device: torch.Tensor) -> None:
    """AFTER SamplingBatchInfo.filter_batch."""
    info.april = info.april.keep(keep_indices, keep_indices_device)


def sampling_merge(_: None, info: Any, other: Any) -> None:
    """AFTER SamplingBatchInfo.merge_batch."""
    info.april = info.april.joined(other.april)


def sampling_copy(result: Any, info: Any) -> None:
    """AFTER SamplingBatchInfo.copy_for_forward: a dataclass copy does not include the attribute."""
    result.april = info.april


def sample(orig: Callable[..., Any], sampler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND Sampler._sample_from_probs: seeded rows are sampled with their own seeds."""
    return draw(orig, sampler, *args, **kwargs)
