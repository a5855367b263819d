"""Expected tokens and logprobs of a sample, computed without SGLang: Hugging Face forwards and the sampling noise.

The oracle replays a sample span by span. A `fresh` or `recomputed` span starts from an empty cache under
its version's weights; a `kept` span continues on the cache that older weights filled. The replay is teacher-forced, so
one near-tie does not affect later tokens: each drawn token must win its own draw, within rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from april_kernels.seeded_sampling.reference import TOP_K_ALL, keep_mask, murmur_hash32

LOGPROB_LIMIT = 1e-4
"""Largest accepted difference of logprobs, float32."""
TIE = 1e-3
"""Scores closer than this may swap their order."""


@cache
def hf_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@dataclass
class ReplayResult:
    """Comparison of a sample with its replay."""

    logprob_error: float = 0.0
    """Largest difference of a behaviour logprob."""
    mismatched_tokens: list[int] = field(default_factory=list)
    """Output tokens that lose their own draw by more than `TIE`."""
    kv_drift: float = 0.0
    """KV drift: largest difference of a kept token's logprob to a plain forward under its version."""
    kept: int = 0
    """Tokens of `kept` spans."""


def drift_of(results: Sequence[ReplayResult]) -> str:
    """What `kv: keep` changes: how far the logprobs of kept tokens are from those of a forward under their version."""
    kept, drift = sum(result.kept for result in results), max(result.kv_drift for result in results)
    return f"{kept} tokens on kept KV, whose logprobs differ by at most {drift:.2g} from a plain forward"


@dataclass
class Oracle:
    """Replays samples; `policies[version]` is the model folder of a policy version."""

    policies: Mapping[int, Path]

    def logits(self, prompt: list[int], output: list[int], version: int) -> torch.Tensor:
        """[output_len, vocab] logits of a plain forward under one version."""
        with torch.inference_mode():
            ids = torch.tensor([prompt + output[:-1]])
            return hf_model(self.policies[version])(ids).logits[0, len(prompt) - 1 :].float()

    def replay(self, prompt: list[int], output: list[int], spans: list[dict[str, Any]]) -> torch.Tensor:
        """[output_len, vocab] logits of a replay, span by span."""
        from transformers import DynamicCache

        ids, rows = prompt + output, []
        cached: Any = None
        for span in spans:
            first, last = len(prompt) + span["start"] - 1, len(prompt) + span["end"] - 1
            if span["kv"] != "kept":
                cached, first = DynamicCache(), 0
            with torch.inference_mode():
                model = hf_model(self.policies[span["version"]])
                out = model(torch.tensor([ids[first:last]]), past_key_values=cached, use_cache=True)
            cached = out.past_key_values
            rows.append(out.logits[0, -(span["end"] - span["start"]) :].float())
        return torch.cat(rows)

    def compare(self, prompt: list[int], sample: Mapping[str, Any], params: Mapping[str, Any]) -> ReplayResult:
        """Compare tokens and logprobs of a finished sample with its replay."""
        output, spans = list(sample["output_ids"]), list(sample["spans"])
        check_spans(spans, len(output))
        chosen = torch.tensor(output)
        got = torch.tensor(sample["logprobs"], dtype=torch.float64)
        rows = processed(self.replay(prompt, output, spans), output, params)
        expected = logprobs_of(rows, chosen)
        result = ReplayResult(logprob_error=float((expected - got).abs().max()))
        result.mismatched_tokens = mismatched_tokens(rows, chosen, len(prompt), sample["seed"], params)
        self.add_drift(result, prompt, sample, params)
        return result

    def add_drift(
        self, result: ReplayResult, prompt: list[int], sample: Mapping[str, Any], params: Mapping[str, Any]
    ) -> None:
        """Compare the tokens of `kept` spans with plain forwards under the versions of these spans."""
        output, got = list(sample["output_ids"]), torch.tensor(sample["logprobs"], dtype=torch.float64)
        for span in (s for s in sample["spans"] if s["kv"] == "kept"):
            plain = processed(self.logits(prompt, output, span["version"]), output, params)
            part = slice(span["start"], span["end"])
            drift = (logprobs_of(plain, torch.tensor(output))[part] - got[part]).abs().max()
            result.kv_drift = max(result.kv_drift, float(drift))
            result.kept += span["end"] - span["start"]

    def check(self, group: Mapping[str, Any], params: Mapping[str, Any]) -> list[ReplayResult]:
        """Assert that every sample of a delivered group matches its replay."""
        results = [self.compare(list(group["prompt_ids"]), sample, params) for sample in group["samples"]]
        for sample, result in zip(group["samples"], results, strict=True):
            where = f"{group['id']}[{sample['index']}] {sample['spans']}"
            assert result.logprob_error < LOGPROB_LIMIT, f"{where}: logprobs are off by {result.logprob_error}"
            assert not result.mismatched_tokens, (
                f"{where}: tokens {result.mismatched_tokens} were not drawn from these weights"
            )
        return results


def check_spans(spans: list[dict[str, Any]], length: int) -> None:
    """Spans cover the output without gaps, versions never fall, a new one starts only where something changes."""
    assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans[:-1])], spans
    assert spans[-1]["end"] == length, (spans, length)
    assert all(s["end"] > s["start"] for s in spans), spans
    pairs = [(s["version"], s["kv"]) for s in spans]
    assert all(a != b and a[0] <= b[0] for a, b in pairwise(pairs)), spans
    assert spans[0]["kv"] == "fresh", spans


def processed(logits: torch.Tensor, output: list[int], params: Mapping[str, Any]) -> torch.Tensor:
    """Logits [output_len, vocab] -> log-softmax after penalties, bias and temperature, float64."""
    rows = logits.double().clone()
    counts = torch.nn.functional.one_hot(torch.tensor(output), rows.shape[1]).double()
    before = counts.cumsum(0) - counts
    rows -= params.get("frequency_penalty", 0.0) * before
    rows -= params.get("presence_penalty", 0.0) * (before > 0)
    repetition = torch.where(before > 0, params.get("repetition_penalty", 1.0), 1.0).double()
    rows = torch.where(rows < 0, rows * repetition, rows / repetition)
    for token, bias in params.get("logit_bias", {}).items():
        rows[:, int(token)] += bias
    return (rows / (params.get("temperature", 1.0) or 1.0)).log_softmax(-1)


def logprobs_of(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the chosen token's entry of every row, [output_len]."""
    return rows.gather(1, chosen[:, None]).squeeze(1)


def mismatched_tokens(
    rows: torch.Tensor, chosen: torch.Tensor, prompt_len: int, seed: int, params: Mapping[str, Any]
) -> list[int]:
    """Positions where another token scores higher: by logprob if greedy, else by logprob plus the token's noise."""
    score, sure = rows, torch.ones_like(rows, dtype=torch.bool)
    possible = sure
    if params.get("temperature", 1.0) > 0:
        positions = prompt_len - 1 + torch.arange(len(chosen))
        hashed = murmur_hash32(torch.full_like(positions, seed), positions, torch.arange(rows.shape[1]))
        score = rows - torch.log(-torch.log((hashed.double() + 0.5) / 2.0**32))
        sure, possible = _kept(rows, params, -TIE), _kept(rows, params, TIE)
    best = score.masked_fill(~sure, -torch.inf).max(-1).values
    own, allowed = logprobs_of(score, chosen), logprobs_of(possible, chosen)
    return torch.nonzero(~allowed | (own < best - TIE)).flatten().tolist()


def _kept(rows: torch.Tensor, params: Mapping[str, Any], slack: float) -> torch.Tensor:
    """Tokens left by top-k, top-p and min-p, bool [output_len, vocab], with top-p and min-p moved by `slack`."""
    count = len(rows)
    top_k = torch.full((count,), params.get("top_k", TOP_K_ALL))
    top_p = params.get("top_p", 1.0)
    top_ps = torch.full((count,), top_p if top_p >= 1 else top_p + slack, dtype=torch.float64)
    min_ps = torch.full((count,), params.get("min_p", 0.0) * (1 - slack), dtype=torch.float64)
    return keep_mask(rows.exp(), top_k, top_ps, min_ps)
