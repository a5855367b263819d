"""Comparison of samples, bit for bit or within the engine's own batch noise."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from april_kernels.seeded_sampling import murmur_hash32
from tests.support.server import Server

Key = tuple[str, int, int]
"""(prompt id, incarnation, index): names a sample of one run."""
ALLOWED = 4
"""Accepted multiple of the stock server's noise in the same session."""

_noise: dict[str, float] = {}


def by_key(groups: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Index the samples of a reply's groups; fail on a duplicate."""
    found: dict[Key, dict[str, Any]] = {}
    for group in groups:
        for sample in group["samples"]:
            key = group["id"], group["incarnation"], sample["index"]
            assert key not in found, f"{key} was delivered twice"
            found[key] = {**sample, "prompt_ids": group["prompt_ids"]}
    return found


def assert_same(actual: dict[Key, dict[str, Any]], wanted: dict[Key, dict[str, Any]]) -> None:
    """Bit for bit: tokens, logprobs, top logprobs, texts, seeds, and how they ended."""
    assert actual.keys() == wanted.keys()
    for key, sample in actual.items():
        for name in ("output_ids", "logprobs", "text", "finish_reason", "seed", "top_logprobs"):
            got, expected = sample.get(name), wanted[key].get(name)
            assert got == expected, f"{key}: {name} differ: {got} instead of {expected}"


def assert_near(
    actual: dict[Key, dict[str, Any]], wanted: dict[Key, dict[str, Any]], noise: float, **how: bool
) -> None:
    """Within `ALLOWED` x `noise`: tokens equal up to the first near-tie, logprobs of those before it close.

    Args:
        noise: largest logprob difference that the stock server shows between batch compositions.
        how: `seeded=True` for samples drawn by their seeds instead of greedily.
    """
    assert actual.keys() == wanted.keys()
    for key, sample in actual.items():
        gap = difference(sample, wanted[key], ALLOWED * noise, **how)
        assert gap <= ALLOWED * noise, f"{key}: {gap} apart, noise {noise}"


def difference(a: dict[str, Any], b: dict[str, Any], tie: float, *, seeded: bool = False) -> float:
    """Largest logprob difference up to the first token that differs; infinite if that was no near-tie.

    Each of the two candidates won in its own run, so with scores closer than `tie` either may win.
    """
    ids, others = a["output_ids"], b["output_ids"]
    first = next((i for i, (x, y) in enumerate(zip(ids, others, strict=False)) if x != y), None)
    if first is None:
        if len(ids) != len(others):
            return math.inf
        return max((abs(x - y) for x, y in zip(a["logprobs"], b["logprobs"], strict=True)), default=0.0)
    if abs(_score(a, first, seeded) - _score(b, first, seeded)) > tie:
        return math.inf
    return max((abs(a["logprobs"][i] - b["logprobs"][i]) for i in range(first)), default=0.0)


def _score(sample: dict[str, Any], token: int, seeded: bool) -> float:
    """Return the sampling score: the logprob, plus the token's Gumbel noise for seeded samples."""
    score = float(sample["logprobs"][token])
    if seeded:
        position = len(sample["prompt_ids"]) + token - 1
        column = torch.tensor([sample["output_ids"][token]])
        hashed = murmur_hash32(torch.tensor([sample["seed"]]), torch.tensor([position]), column)
        score -= math.log(-math.log((float(hashed) + 0.5) / 2**32))
    return score


def stock_noise(server: Server) -> float:
    """Largest logprob difference on SGLang's own `/generate`: the same prompts alone, 7 and 24 at a time."""
    if server.name not in _noise:
        prompts = [[5 + i, 9, 2 + i % 5, 30 + i] for i in range(24)]
        alone = [row for prompt in prompts[:5] for row in _generate(server, [prompt])]
        seven, many = _generate(server, prompts[:7]), _generate(server, prompts)
        pairs = [(x, y) for rows in (seven, many) for x, y in zip(alone, rows, strict=False)]
        pairs += list(zip(seven, many, strict=False))
        noise = max(difference(x, y, 1e-4) for x, y in pairs)
        assert 0 < noise < 1e-4, f"stock noise {noise}"
        _noise[server.name] = noise
    return _noise[server.name]


def _generate(server: Server, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    return [
        {
            "output_ids": reply["output_ids"],
            "logprobs": [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]],
        }
        for reply in server.post("/generate", body)
    ]
