"""Restores the penalty state of a resumed sample.

SGLang starts every batch with empty penalty counters and adds `output_ids[-1]` before each decode step, so a request
that is prefilled again, or that joins as a decode row, would lose the counts of its earlier tokens. They are
replayed here: all n before a prefill (which samples token n+1), n - 1 before a decode step (which adds the last one).
"""

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_april.adapter.core.host_to_device import to_device


def replay_penalties(batch: ScheduleBatch, info: SamplingBatchInfo, rows: list[int], *, prefill: bool) -> None:
    """Bring the fresh counters of `info` to the state that `rows` had when they were suspended."""
    orchestrator = info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    for row in rows:
        tokens = _history(batch.reqs[row], prefill)
        if not len(tokens):
            continue
        history = to_device(tokens, torch.int64, batch.device)
        for penalizer in orchestrator.penalizers.values():
            if penalizer.is_prepared():
                _replay(penalizer, row, history)


def _history(req: Req, prefill: bool) -> list[int]:
    return list(req.output_ids if prefill else req.output_ids[:-1])


def _replay(penalizer: _BatchedPenalizer, row: int, history: torch.Tensor) -> None:
    """Add `history` (int64 [tokens]) to one row's counters, as that many `cumulate_output_tokens` would have."""
    match penalizer:
        case BatchedFrequencyPenalizer():
            source = penalizer.frequency_penalties[row].expand(len(history)).contiguous()
            penalizer.cumulated_frequency_penalties[row].scatter_add_(0, history, source)
        case BatchedPresencePenalizer():
            penalizer.cumulated_presence_penalties[row, history] = penalizer.presence_penalties[row]
        case BatchedRepetitionPenalizer():
            penalizer.cumulated_repetition_penalties[row, history] = penalizer.repetition_penalties[row]
        case BatchedMinNewTokensPenalizer():
            penalizer.len_output_tokens[row] += len(history)
        case _:
            raise TypeError(f"unknown penalizer {type(penalizer).__name__}")
