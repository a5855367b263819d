"""Keep or recompute: what each costs one sample, in seconds, from rates measured on this machine.

Prefilling T tokens again takes `token_s·T + square_s·T²`: the second part is attention, so a token of a long sample
costs more. Keeping them takes a copy off the device and one back, both linear in T, and nothing where the pages never
left. So the longer the sample, the more keeping is worth: `break_even_tokens` says from where on.

Upper bounds on the side of keeping: copies run beside the model, a prefill takes the model's own time. Members of a
group share their prompt both ways, in the tree and in the store; here each counts as a whole.
"""

import math
from collections.abc import Sequence
from typing import Any

from sglang_april.api.messages import Rates
from sglang_april.kv.kv_pages import CopyTier

FREE = (0.0, 0.0)


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(token_s, square_s), both ≥ 0, from prefills of (tokens, seconds): least squares of the seconds per token.

    Raises ValueError without a point.
    """
    if not points:
        raise ValueError("no prefill has been timed")
    rates = [seconds / tokens for tokens, seconds in points]
    middle, mean = sum(t for t, _ in points) / len(points), sum(rates) / len(rates)
    spread = sum((t - middle) ** 2 for t, _ in points)
    slope = sum((t - middle) * (r - mean) for (t, _), r in zip(points, rates, strict=True)) / spread if spread else 0.0
    slope = min(max(0.0, slope), mean / middle)
    return max(0.0, mean - slope * middle), slope


def slowest(ranks: Sequence[Rates]) -> Rates:
    """What all ranks together take, each on its own part: as long as the slowest; a tier that one lacks, none has."""
    tiers = [tier for tier in ranks[0].copy_s if all(tier in rank.copy_s for rank in ranks)]
    return Rates(
        max(rank.token_s for rank in ranks),
        max(rank.square_s for rank in ranks),
        {t: (max(rank.copy_s[t][0] for rank in ranks), max(rank.copy_s[t][1] for rank in ranks)) for t in tiers},
    )


def recompute_s(rates: Rates, tokens: int) -> float:
    """Seconds to prefill so many tokens of one sample again."""
    return rates.token_s * tokens + rates.square_s * tokens**2


def store_s(rates: Rates, tier: CopyTier, tokens: int) -> float:
    """Seconds to copy KV of so many tokens to a tier and back; what could not be measured counts as free."""
    out, back = rates.copy_s.get(tier, FREE)
    return (out + back) * tokens


def load_s(rates: Rates, tier: CopyTier, tokens: int) -> float:
    """Seconds to copy it back alone."""
    return rates.copy_s.get(tier, FREE)[1] * tokens


def break_even_tokens(rates: Rates, tier: CopyTier) -> int | None:
    """The length from which on storing on this tier is cheaper than recomputing; None if it never is."""
    more = store_s(rates, tier, 1) - rates.token_s
    if more <= 0:
        return 1
    return math.ceil(more / rates.square_s) if rates.square_s else None


def report(rates: Rates | None, bytes_per_token: int) -> dict[str, Any] | None:
    """The inputs of `kv: auto` for `/april/state` and a reply's `stats`; None as long as nothing has been measured."""
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
