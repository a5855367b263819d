"""`kv: auto`: keep or recompute, decided per sample from rates measured at start.

Prefilling T tokens again takes `token_s·T + square_s·T²` seconds; the quadratic term is attention, so a token of a long
sample costs more. Keeping them takes one copy off the device and one back, both linear in T, and nothing if the pages
never left the device. So keeping pays off from some length on: `break_even_tokens`.

The costs of keeping are upper bounds: copies overlap with the model, whereas a prefill takes the model's own time.
Members of a group share their prompt both ways, in the radix tree and in the store; here each counts in full.

The decision is made twice. When pages must leave the device, a copy off and back is weighed against a recompute. When
the sample resumes, only the copy back counts, and nothing if the pages are on the device, so whatever was worth storing
is worth loading. Both are pure functions of broadcast rates, equal on every rank (`rank-determinism`). Until rates are
known everything is kept. KV of the current version is always kept, KV older than `max_staleness` never (`kv-policy`).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from sglang_april.api.messages import Rates
from sglang_april.kv.kv_pages import CopyTier, Tier

FREE = (0.0, 0.0)
"""Seconds per token of a copy that could not be measured."""

Reason = Literal["", "asked", "cheaper", "stale"]
"""Why KV is discarded: `kv: recompute`, cost, or age beyond `max_staleness`; empty: it is kept."""


def fit_prefill(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit (token_s, square_s), both ≥ 0, to prefills of (tokens, seconds) by least squares of the seconds per token.

    Raises:
        ValueError: there is no point.
    """
    if not points:
        raise ValueError("no prefill has been timed")
    rates = [seconds / tokens for tokens, seconds in points]
    middle, mean = sum(t for t, _ in points) / len(points), sum(rates) / len(rates)
    spread = sum((t - middle) ** 2 for t, _ in points)
    slope = sum((t - middle) * (r - mean) for (t, _), r in zip(points, rates, strict=True)) / spread if spread else 0.0
    slope = min(max(0.0, slope), mean / middle)
    return max(0.0, mean - slope * middle), slope


def slowest_rank(ranks: Sequence[Rates]) -> Rates:
    """The rates of all ranks together: the maximum of each, and only the tiers that every rank has."""
    tiers = [tier for tier in ranks[0].copy_s if all(tier in rank.copy_s for rank in ranks)]
    return Rates(
        max(rank.token_s for rank in ranks),
        max(rank.square_s for rank in ranks),
        {t: (max(rank.copy_s[t][0] for rank in ranks), max(rank.copy_s[t][1] for rank in ranks)) for t in tiers},
    )


def recompute_s(rates: Rates, tokens: int) -> float:
    """Seconds to prefill `tokens` tokens of one sample again."""
    return rates.token_s * tokens + rates.square_s * tokens**2


def store_s(rates: Rates, tier: CopyTier, tokens: int) -> float:
    """Seconds to copy the KV of `tokens` tokens to a tier and back; a copy that was not measured counts as free."""
    out, back = rates.copy_s.get(tier, FREE)
    return (out + back) * tokens


def load_s(rates: Rates, tier: CopyTier, tokens: int) -> float:
    """Seconds to copy the KV of `tokens` tokens from a tier to the device."""
    return rates.copy_s.get(tier, FREE)[1] * tokens


def break_even_tokens(rates: Rates, tier: CopyTier) -> int | None:
    """Tokens from which storing on this tier is cheaper than recomputing; None if it never is."""
    more = store_s(rates, tier, 1) - rates.token_s
    if more <= 0:
        return 1
    return math.ceil(more / rates.square_s) if rates.square_s else None


def why_not_store(rates: Rates | None, tier: CopyTier, tokens: int, age: int, bound: int | None) -> Reason:
    """Why pages are not copied to `tier`; empty if they are.

    Args:
        tokens: length of the KV.
        age: policy versions between the oldest page and the version under which the sample will resume, as far as
            known.
        bound: `max_staleness`; None: no bound.
    """
    return _why(age, bound, rates is not None and recompute_s(rates, tokens) < store_s(rates, tier, tokens))


def why_not_resume(rates: Rates | None, tier: Tier, tokens: int, age: int, bound: int | None) -> Reason:
    """Why a sample does not resume on its pages, which are on `tier`; empty if it does. Arguments as above."""
    cheaper = rates is not None and tier != "device" and recompute_s(rates, tokens) < load_s(rates, tier, tokens)
    return _why(age, bound, cheaper)


def _why(age: int, bound: int | None, cheaper: bool) -> Reason:
    if age <= 0:
        return ""
    if bound is not None and age > bound:
        return "stale"
    return "cheaper" if cheaper else ""


def report(rates: Rates | None, bytes_per_token: int) -> dict[str, Any] | None:
    """The inputs of `kv: auto` for `/april/state` and a reply's `stats`; None until the rates are measured."""
    if rates is None:
        return None
    return {
        "token_s": rates.token_s,
        "square_s": rates.square_s,
        "bytes_per_token": bytes_per_token,
        "tiers": {
            tier: {
                "out_gb_per_s": _gb_per_s(bytes_per_token, out),
                "back_gb_per_s": _gb_per_s(bytes_per_token, back),
                "break_even_tokens": break_even_tokens(rates, tier),
            }
            for tier, (out, back) in rates.copy_s.items()
        },
    }


def _gb_per_s(size: int, seconds: float) -> float | None:
    return size / seconds / 1e9 if seconds else None
