"""`kv: auto`, decided per sample: why its KV is better computed again than kept, or an empty string.

Asked twice. When pages have to leave the device, a copy out and back stands against a recompute. When the sample
resumes, the way out is paid for: only the way back counts, and nothing where the pages are on the device. What was
worth a copy is thus worth loading. Pure, and the same on every rank: the rates came as a broadcast message (S9). Before
they are known everything is kept; KV of the current version always is (S6); KV older than `max_staleness` never is.
"""

from typing import Literal

from sglang_april.api.messages import Rates
from sglang_april.kv.cost_model import load_s, recompute_s, store_s
from sglang_april.kv.kv_pages import CopyTier, Tier

Reason = Literal["", "asked", "cheaper", "stale"]
"""Why KV is let go: by `kv: recompute`, by cost, or because it is older than the bound; empty: it is kept."""


def why_not_store(rates: Rates | None, tier: CopyTier, tokens: int, age: int, bound: int | None) -> Reason:
    """Whether pages are worth a copy on `tier`.

    Args:
        tokens: of KV.
        age: policy versions between the oldest page and the one under which the sample will resume, as far as known.
        bound: `max_staleness`.
    """
    return _why(age, bound, rates is not None and recompute_s(rates, tokens) < store_s(rates, tier, tokens))


def why_not_resume(rates: Rates | None, tier: Tier, tokens: int, age: int, bound: int | None) -> Reason:
    """Whether a sample continues on its pages, which are on `tier`; the rest as above."""
    cheaper = rates is not None and tier != "device" and recompute_s(rates, tokens) < load_s(rates, tier, tokens)
    return _why(age, bound, cheaper)


def _why(age: int, bound: int | None, cheaper: bool) -> Reason:
    if age <= 0:
        return ""
    if bound is not None and age > bound:
        return "stale"
    return "cheaper" if cheaper else ""
