"""The new policy's logprobs of old tokens, computed in the prefill of a recompute (`proximal-logprobs`).

The trainer's proximal policy costs no extra forward, only one lm_head over the old tokens, in row chunks. Values are
log-softmax of (logits + logit bias) / temperature. Samples with penalties, a grammar or `min_new_tokens` have none,
because a prefill does not have the state of those at each old token.
"""

import contextlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_april.adapter.core.host_to_device import to_device
from sglang_april.adapter.shapes.installed import shape
from sglang_april.http.validation import GRAMMARS
from sglang_april.scheduler.state import Proximal, Sample

RESCORE = "april_rescore"
"""Key in `custom_params` of the audit's requests: the temperature at which their input logprobs are wanted."""
CHUNK_ROWS = 512
"""Rows of logits alive at once; 512 x 152k x 4 bytes = 311 MB."""


def is_eligible(req: Req) -> bool:
    """Whether the sampling distribution depends only on logits, bias and temperature."""
    return not is_penalised(req.sampling_params) and not _is_constrained(req)


def _is_constrained(req: Req) -> bool:
    """Whether a grammar masks logits: `--enable-strict-thinking` gives every request one, which masks none unless the
    request asks for reasoning."""
    return req.grammar is not None and (req.require_reasoning or any(getattr(req.sampling_params, g) for g in GRAMMARS))


def is_penalised(params: SamplingParams) -> bool:
    """Whether logits are modified depending on the tokens sampled before."""
    penalties = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return bool(penalties or params.min_new_tokens)


def recomputed_rows(batch: ScheduleBatch) -> list[Sample | None] | None:
    """Per row of a prefill batch: the sample whose proximal logprobs are wanted; None if there is no such row."""
    rows = [
        r.april if r.april is not None and r.april.recompute.in_progress and r.april.recompute.proximal else None
        for r in batch.reqs
    ]
    return rows if any(rows) else None


def prefix_limit(limit: int, req: Req, _input_len: int) -> int:
    """AFTER Req._compute_max_prefix_len: old tokens in a shared prefix would have no states to take logprobs from."""
    sample = req.april
    if sample is not None and sample.recompute.in_progress and sample.recompute.proximal:
        return min(limit, len(req.origin_input_ids) - 1)
    return limit


def with_proximal(
    stock: Callable[..., Any],
    processor: Any,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    lm_head: Any,
    metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND LogitsProcessor.forward. `hidden_states`: [tokens of the batch, hidden], rows one after the other."""
    rows = getattr(getattr(metadata, "sampling_info", None), "april", None)
    if rows is None or (rows.proximal is None and rows.rescored is None) or not _is_prefill(metadata):
        return stock(processor, input_ids, hidden_states, lm_head, metadata, *args, **kwargs)
    with _entry_barrier(processor):
        if rows.proximal is not None:
            _compute_proximal(rows.proximal, processor, hidden_states, lm_head, metadata)
        result = stock(processor, input_ids, hidden_states, lm_head, metadata, *args, **kwargs)
        if rows.rescored is not None and result.input_token_logprobs is not None:
            _apply_temperatures(result.input_token_logprobs, processor, hidden_states, lm_head, metadata, rows.rescored)
    return result


def _is_prefill(metadata: Any) -> bool:
    return isinstance(metadata, ForwardBatch) and metadata.forward_mode.is_extend()


@contextlib.contextmanager
def _entry_barrier(processor: Any) -> Iterator[None]:
    """Make TP ranks wait for each other before each gather of logits.

    On NVSwitch the other ranks write their logits to this rank's buffer. SGLang skips the barrier
    (`MultimemAllGatherer.skip_entry_sync`), because the all-reduces of a forward separate its gather from the next
    forward's. Several gathers in one forward need the barrier: otherwise a fast rank overwrites logits that a slow rank
    still reads.
    """
    gatherer = processor._logits_gatherer
    skips, gatherer._skip_entry_sync = gatherer._skip_entry_sync, False
    try:
        yield
    finally:
        gatherer._skip_entry_sync = skips


def _compute_proximal(
    wanted: list[Sample | None], processor: Any, hidden_states: torch.Tensor, lm_head: Any, batch: ForwardBatch
) -> None:
    """Append the proximal logprobs of this prefill to the collectors of its samples."""
    plain = LogitsMetadata.from_forward_batch(batch)
    for sample, proximal, first, states, targets in _old_tokens(wanted, batch, hidden_states):
        values = [
            _logprobs(processor, states[i : i + CHUNK_ROWS], targets[i : i + CHUNK_ROWS], lm_head, plain, sample)
            for i in range(0, len(states), CHUNK_ROWS)
        ]
        proximal.parts.append((first, torch.cat(values)))


def _apply_temperatures(
    logprobs: torch.Tensor,
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    batch: ForwardBatch,
    temperatures: list[float | None],
) -> None:
    """Replace the input logprobs of audited rows by those at the temperature at which their tokens were drawn.

    Args:
        logprobs: float [sum over rows of computed tokens from `logprob_start_len` on], changed in place.
    """
    plain = LogitsMetadata.from_forward_batch(batch)
    row_start = out = 0
    rows = zip(temperatures, batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu, strict=False)
    for temperature, begin, length in rows:
        count = length - begin
        if temperature is not None:
            states = hidden_states[row_start + begin : row_start + length]
            targets = batch.extend_input_logprob_token_ids_gpu[out : out + count]
            for i in range(0, count, CHUNK_ROWS):
                part = slice(i, i + CHUNK_ROWS)
                logits = shape.logits(processor, states[part], lm_head, plain).float()
                values = logits.div_(temperature).log_softmax(dim=-1).gather(1, targets[part, None]).squeeze(1)
                logprobs[out + i : out + i + len(values)] = values
        row_start, out = row_start + length, out + count


def rescored_rows(batch: ScheduleBatch) -> list[float | None] | None:
    """Per row of a prefill batch: the temperature of an audited sample; None if there is no such row."""
    rows = [_rescore_temperature(r.sampling_params.custom_params) for r in batch.reqs]
    return rows if any(rows) else None


def _rescore_temperature(custom: Any) -> float | None:
    """The value of `RESCORE`, or None. Any client may send it; it only scales logprobs of its own prompt."""
    value = custom.get(RESCORE) if isinstance(custom, dict) else None
    return value if isinstance(value, float) and 0 < value < float("inf") else None


def _old_tokens(
    wanted: list[Sample | None], batch: ForwardBatch, hidden_states: torch.Tensor
) -> Iterator[tuple[Sample, Proximal, int, torch.Tensor, torch.Tensor]]:
    """(sample, its collector, index of the first output token, states that predict output tokens, those tokens)."""
    row_start = 0
    for sample, prefix, length in zip(wanted, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False):
        if sample is not None and sample.recompute.proximal is not None:
            req = sample.request
            prompt, total = len(req.origin_input_ids), req.seqlen
            begin, end = max(prefix, prompt - 1), min(prefix + length, total - 1)
            if begin < end:
                states = hidden_states[row_start + begin - prefix : row_start + end - prefix]
                tokens: array[int] = req.output_ids[begin + 1 - prompt : end + 1 - prompt]
                yield (
                    sample,
                    sample.recompute.proximal,
                    begin + 1 - prompt,
                    states,
                    to_device(tokens, torch.int64, states.device),
                )
        row_start += length


def _logprobs(
    processor: Any, states: torch.Tensor, targets: torch.Tensor, lm_head: Any, metadata: Any, sample: Sample
) -> torch.Tensor:
    """float32 [rows] on the device; read when the sample finishes."""
    params = sample.request.sampling_params
    logits = shape.logits(processor, states, lm_head, metadata).float()
    for column, bias in (params.logit_bias or {}).items():
        logits[:, int(column)] += bias
    logits.div_(params.temperature)
    return logits.log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1)


def proximal_logprobs(
    sample: Sample, length: int, behaviour: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], int] | None:
    """Proximal logprobs of `length` output tokens and their version; None if no recompute gave any.

    Tokens drawn under that very version repeat their behaviour value; tokens of later versions have NaN.
    """
    if sample.recompute.proximal is None:
        return None
    version = sample.recompute.proximal.version
    values = np.full(length, np.nan, dtype="<f4")
    for first, part in sample.recompute.proximal.parts:
        values[first : first + len(part)] = part.float().cpu().numpy()[: max(0, length - first)]
    for span in sample.closed_spans():
        if span.version == version:
            values[span.start : span.end] = behaviour[span.start : span.end]
    return values, version
