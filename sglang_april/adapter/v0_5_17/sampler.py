"""Samples rows with a seed of their own: those of rollouts, and attached ones that name one (`seed-independence`).

Other rows have SGLang's own sampler. SGLang seeds a whole batch (one tensor, refused with flashinfer's top-p), so the
per-row seeds are kept apart: `RowSeeds` follows `SamplingBatchInfo` through filter, merge and copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from april_kernels.seeded_sampling import keep_mask, seeded_sample
from sglang_april.adapter.v0_5_17.proximal import recomputed_rows, rescored_rows
from sglang_april.scheduler.state import Sample


@dataclass(slots=True)
class RowSeeds:
    """Which rows of a batch have seeds of their own, these seeds, and the rows that need proximal logprobs."""

    seeded: list[bool]
    seeds: torch.Tensor
    """int64 [rows] on the device of the batch; 0 in rows of other requests."""
    proximal: list[Sample | None] | None = None
    """Rows of a prefill that need proximal logprobs (proximal.py); None after it."""
    rescored: list[float | None] | None = None
    """Rows of a prefill that belong to the audit, with the temperature of their sample; None after it."""

    @classmethod
    def of(cls, batch: ScheduleBatch) -> "RowSeeds":
        seeded = [r.april is not None and r.sampling_params.sampling_seed is not None for r in batch.reqs]
        seeds = [r.sampling_params.sampling_seed if mine else 0 for r, mine in zip(batch.reqs, seeded, strict=True)]
        return cls(
            seeded,
            torch.tensor(seeds, dtype=torch.int64, device=batch.device),
            recomputed_rows(batch),
            rescored_rows(batch),
        )

    def keep(self, rows: list[int], rows_on_device: torch.Tensor) -> "RowSeeds":
        return RowSeeds([self.seeded[i] for i in rows], self.seeds[rows_on_device])

    def joined(self, other: "RowSeeds") -> "RowSeeds":
        return RowSeeds(self.seeded + other.seeded, torch.cat([self.seeds, other.seeds]))


def draw(
    stock: Callable[..., torch.Tensor],
    sampler: Any,
    probs: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
    simple: bool,
) -> torch.Tensor:
    """Next token ids, int [rows]. `probs` float [rows, vocab] after temperature; read only."""
    rows: RowSeeds | None = getattr(info, "april", None)
    if rows is None or not any(rows.seeded):
        return stock(sampler, probs, info, positions, simple)
    if all(rows.seeded):
        return _seeded_rows(probs, info, rows.seeds, positions, simple, slice(None)).to(torch.int32)
    tokens = stock(sampler, probs, info, positions, simple)
    mine = torch.tensor([i for i, seeded in enumerate(rows.seeded) if seeded], device=probs.device)
    tokens[mine] = _seeded_rows(probs[mine], info, rows.seeds[mine], positions[mine], simple, mine).to(tokens.dtype)
    return tokens


def _seeded_rows(
    probs: torch.Tensor, info: SamplingBatchInfo, seeds: torch.Tensor, positions: torch.Tensor, simple: bool, rows: Any
) -> torch.Tensor:
    keep = None if simple else keep_mask(probs, info.top_ks[rows], info.top_ps[rows], info.min_ps[rows])
    return seeded_sample(probs, seeds, positions, keep)
