"""Samples rows with per-row seeds: those of rollouts, and attached ones that name a seed (`seed-independence`).

SGLang's own sampler draws the other rows. SGLang seeds a whole batch (one tensor, refused with flashinfer's top-p), so
the per-row seeds are stored separately: `RowSeeds` follows `SamplingBatchInfo` through filter, merge and copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from april_kernels.seeded_sampling import TOP_K_ALL, keep_mask, seeded_sample, sorted_rows
from sglang_april.adapter.core.host_to_device import to_device
from sglang_april.adapter.core.proximal import recomputed_rows, rescored_rows
from sglang_april.adapter.shapes.installed import shape
from sglang_april.scheduler.state import Sample


@dataclass(slots=True)
class RowSeeds:
    """The rows of a batch with per-row seeds, these seeds, and the rows that need proximal logprobs."""

    seeded: list[bool]
    filtered: list[bool]
    """Rows with a seed whose top-k, top-p or min-p leaves columns out."""
    on_device: torch.Tensor | None
    """int64 [2, rows] on the device of the batch: the seeds, 0 in rows of other requests; and `seeded` as 0 or 1. None
    if no row has a seed."""
    proximal: list[Sample | None] | None = None
    """Rows of a prefill that need proximal logprobs (proximal.py); None after it."""
    rescored: list[float | None] | None = None
    """Rows of a prefill that belong to the audit, with the temperature of their sample; None after it."""
    _filtered_rows: torch.Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, batch: ScheduleBatch) -> "RowSeeds":
        seeded = [r.april is not None and r.sampling_params.sampling_seed is not None for r in batch.reqs]
        seeds = [r.sampling_params.sampling_seed if mine else 0 for r, mine in zip(batch.reqs, seeded, strict=True)]
        filtered = [mine and _is_filtered(r.sampling_params) for r, mine in zip(batch.reqs, seeded, strict=True)]
        on_device = to_device([seeds, seeded], torch.int64, batch.device) if any(seeded) else None
        return cls(seeded, filtered, on_device, recomputed_rows(batch), rescored_rows(batch))

    def keep(self, rows: list[int], rows_on_device: torch.Tensor) -> "RowSeeds":
        seeded = [self.seeded[i] for i in rows]
        on_device = self.on_device[:, rows_on_device] if self.on_device is not None and any(seeded) else None
        return RowSeeds(seeded, [self.filtered[i] for i in rows], on_device)

    def joined(self, other: "RowSeeds") -> "RowSeeds":
        known = next((one.on_device for one in (self, other) if one.on_device is not None), None)
        on_device = None if known is None else torch.cat([self._columns(known), other._columns(known)], dim=1)
        return RowSeeds(self.seeded + other.seeded, self.filtered + other.filtered, on_device)

    def _columns(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(2, len(self.seeded)) if self.on_device is None else self.on_device

    def filtered_rows(self, device: torch.device) -> torch.Tensor:
        """Indices of the filtered rows, int64, on the device; copied there once per composition of the batch."""
        if self._filtered_rows is None:
            rows = [i for i, filtered in enumerate(self.filtered) if filtered]
            self._filtered_rows = to_device(rows, torch.int64, device)
        return self._filtered_rows


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k != TOP_K_ALL or params.top_p != 1.0 or params.min_p > 0


def draw(
    stock: Callable[..., Any],
    sampler: Any,
    probs: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
    simple: bool,
) -> Any:
    """SGLang's result with the next token ids, int [rows]. `probs` float [rows, vocab] after temperature; read only."""
    rows: RowSeeds | None = getattr(info, "april", None)
    if rows is None or rows.on_device is None:
        return stock(sampler, probs, info, positions, simple)
    seeds, mine = rows.on_device
    drawn = seeded_sample(probs, seeds, positions, _keep(probs, info, rows))
    if all(rows.seeded):
        return shape.sampled(drawn.to(torch.int32))
    # All rows are drawn, because selecting rows would copy their probabilities.
    result = stock(sampler, probs, info, positions, simple)
    tokens = shape.tokens_of(result)
    return shape.sampled(torch.where(mine.bool(), drawn.to(tokens.dtype), tokens), result)


def _keep(probs: torch.Tensor, info: SamplingBatchInfo, rows: RowSeeds) -> torch.Tensor | None:
    """Columns that may be drawn, bool [rows, vocab]; None for all. Only filtered rows are sorted."""
    if not any(rows.filtered):
        return None
    if all(rows.filtered):
        return keep_mask(probs, info.top_ks, info.top_ps, info.min_ps)
    keep = torch.ones_like(probs, dtype=torch.bool)
    for some in rows.filtered_rows(probs.device).split(sorted_rows(probs)):
        keep[some] = keep_mask(probs[some], info.top_ks[some], info.top_ps[some], info.min_ps[some])
    return keep
