"""Rounds to rows. Every figure is counted, or None where a variant cannot observe it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean, mean, median, quantiles
from typing import Any

from bench.rollout.engine_client import Counters
from bench.rollout.lengths import Lengths
from bench.rollout.variant import Plan, RoundResult, versions


class IdentityError(AssertionError):
    """generated = delivered + Δcarry + wasted does not hold: tokens were lost, or counted twice."""


@dataclass(frozen=True)
class Measured:
    """One round: seconds from the start of the push to the reply (with a trainer, to the end of its step), and the
    scheduler's counters over that time."""

    round: RoundResult
    seconds: float
    decoded: int
    steps: int
    prefilled: int
    after_end: int | None
    push_s: float = 0.0
    """Seconds of the push, included in `seconds`."""


def between(before: Counters, after: Counters, done: RoundResult, seconds: float, push_s: float = 0.0) -> Measured:
    """A measured round from the counters before and after it."""
    return Measured(
        done,
        seconds,
        decoded=after.decoded - before.decoded,
        steps=after.steps - before.steps,
        prefilled=after.prefilled - before.prefilled,
        after_end=done.after_end if done.decoded_at_end is None else max(0, after.decoded - done.decoded_at_end),
        push_s=push_s,
    )


@dataclass
class Block:
    """Consecutive measured rounds, and the tokens carried into the first."""

    carry_before: int
    rounds: list[Measured]


def grown(block: Block) -> int:
    """Growth of the carry over a block, in tokens."""
    return (block.rounds[-1].round.carry or 0) - block.carry_before


def check_identity(blocks: Sequence[Block]) -> bool | None:
    """Check the identity for each block; None for variants that cannot observe their requests in flight.

    Raises:
        IdentityError: tokens were lost or counted twice.
    """
    for block in blocks:
        if any(measured.round.generated is None for measured in block.rounds):
            return None
        generated = sum(measured.round.generated or 0 for measured in block.rounds)
        delivered = sum(measured.round.tokens for measured in block.rounds)
        wasted = sum(measured.round.wasted for measured in block.rounds)
        if generated != delivered + grown(block) + wasted:
            counts = f"{generated} generated, {delivered} delivered, carry grown by {grown(block)}, {wasted} wasted"
            raise IdentityError(counts)
    return True


def round_metrics(blocks: Sequence[Block], plan: Plan, lengths: Lengths, limits: Sequence[float]) -> dict[str, Any]:
    """The measured part of a row. `limits`: full-batch decode rates in tokens/s before, between and after the rounds,
    each over the same number of tokens, so that their harmonic mean is the overall rate."""
    rounds = [measured for block in blocks for measured in block.rounds]
    limit = harmonic_mean(limits)
    seconds = sum(measured.seconds for measured in rounds)
    tokens = sum(measured.round.tokens for measured in rounds)
    groups = [group for measured in rounds for group in measured.round.groups if not group.rejected]
    delivered = [length for group in groups for length in group.lengths]
    distance = lengths.distance(delivered)
    decoded, steps = sum(measured.decoded for measured in rounds), sum(measured.steps for measured in rounds)
    total = _sum([measured.round.generated for measured in rounds])
    took = [measured.seconds for measured in rounds]
    return {
        "rounds": len(rounds),
        "seconds": round(seconds, 4),
        "delivered_tokens": tokens,
        "delivered_samples": len(delivered),
        "delivered_tokens_per_s": tokens / seconds,
        "delivered_groups_per_s": len(delivered) / plan.n / seconds,
        "generated_tokens": total,
        "generated_tokens_per_s": (decoded if total is None else total) / seconds,
        "wasted_tokens": sum(measured.round.wasted for measured in rounds),
        "carry_start": blocks[0].carry_before,
        "carry_end": rounds[-1].round.carry,
        "carry_grown": sum(map(grown, blocks)),
        "identity": check_identity(blocks),
        "ks_distance": round(distance, 4),
        "biased": distance > lengths.biased_above,
        "length_mean": mean(delivered) if delivered else None,
        "round_s_p50": median(took),
        "round_s_p95": quantiles(took, n=20, method="inclusive")[-1] if len(took) > 1 else took[0],
        "push_s_p50": median(measured.push_s for measured in rounds),
        "tokens_after_end": _sum([measured.after_end for measured in rounds]),
        "reprefilled_tokens": _sum([measured.round.reprefilled for measured in rounds]),
        "decoded_tokens": decoded,
        "computed_tokens": decoded + sum(measured.round.legs for measured in rounds),
        "decode_steps": steps,
        "prefilled_tokens": sum(measured.prefilled for measured in rounds),
        "mean_running": decoded / steps if steps else None,
        "full_batch_tokens_per_s": limit,
        "full_batch_looks": [round(rate, 1) for rate in limits],
        "share_of_limit": tokens / seconds / limit,
        "off_policy_share": _share([group.off_policy for group in groups], tokens),
        "hybrid_share": _share([group.hybrid for group in groups], tokens),
        "staleness": _ages(rounds),
        "rounds_prolonged": sum(measured.round.prolonged for measured in rounds),
        "peak_bytes": _peak(rounds),
    }


def limit_of(row: dict[str, Any]) -> float:
    """The full-batch rate around a row in tokens/s: the harmonic mean of its probes (the arithmetic mean in older
    rows)."""
    looks = row.get("full_batch_looks")
    return harmonic_mean(looks) if looks else float(row["full_batch_tokens_per_s"])


def share(row: dict[str, Any]) -> float:
    """Delivered tokens/s as a share of the limit."""
    return float(row["delivered_tokens_per_s"] / limit_of(row))


def peaks(rows: Sequence[dict[str, Any]]) -> str:
    """Largest carry over the rows by tier, in MB."""
    tiers = dict.fromkeys(tier for row in rows for tier in row["peak_bytes"])
    most = {tier: max(row["peak_bytes"].get(tier, 0) for row in rows) for tier in tiers}
    return ", ".join(f"{tier} {peak / 1e6:,.1f}" for tier, peak in most.items()) or "–"


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _share(counts: list[int | None], tokens: int) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) / tokens if tokens and len(known) == len(counts) else None


def _ages(rounds: list[Measured]) -> dict[str, int]:
    ages: Counter[str] = Counter()
    for measured in rounds:
        ages.update(versions(measured.round.groups, measured.round.version))
    return dict(sorted(ages.items()))


def _peak(rounds: list[Measured]) -> dict[str, int]:
    tiers = {tier for measured in rounds for tier in measured.round.bytes_by_tier}
    return {tier: max(m.round.bytes_by_tier.get(tier, 0) for m in rounds) for tier in sorted(tiers)}
