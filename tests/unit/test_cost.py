"""The cost model of `kv: auto`: the costs of keeping and recomputing, and the decision (`kv-policy`)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_april.api import messages
from sglang_april.kv import cost_model
from sglang_april.kv.cost_model import why_not_resume, why_not_store
from sglang_april.kv.kv_pages import CopyTier

seconds = st.floats(1e-9, 1e-2)
rates_ = st.builds(
    messages.Rates,
    seconds,
    st.just(0.0) | st.floats(1e-12, 1e-6),
    st.dictionaries(st.sampled_from(["host", "disk"]), st.tuples(seconds, seconds)),
)
tiers: st.SearchStrategy[CopyTier] = st.sampled_from(["host", "disk"])
tokens_ = st.integers(1, 200_000)
ages = st.integers(-1, 9)
bounds = st.none() | st.integers(0, 6)


@settings(deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.sets(st.integers(1, 9000), min_size=2))
def test_fit_recovers_the_rates(token_s: float, square_s: float, lengths: set[int]) -> None:
    """Times that follow the model give its two coefficients."""
    found = cost_model.fit_prefill([(t, token_s * t + square_s * t * t) for t in lengths])
    longest = max(lengths)
    again = cost_model.recompute_s(messages.Rates(*found, {}), longest)
    assert again == pytest.approx(token_s * longest + square_s * longest**2, rel=1e-3)


@settings(deadline=None)
@given(st.lists(st.tuples(tokens_, seconds), min_size=1))
def test_fitted_rates_are_never_negative(points: list[tuple[int, float]]) -> None:
    """Times of a busy machine may follow no model: a longer prefill may have been faster."""
    token_s, square_s = cost_model.fit_prefill(points)
    assert token_s >= 0
    assert square_s >= 0
    assert token_s + square_s > 0


def test_fit_without_measurements_raises() -> None:
    with pytest.raises(ValueError, match="no prefill"):
        cost_model.fit_prefill([])


def test_combined_rates_are_the_maximum_over_ranks() -> None:
    """A tier that one rank lacks is left out (`rank-determinism`)."""
    ranks = [
        messages.Rates(1.0, 4.0, {"host": (1.0, 5.0), "disk": (7.0, 8.0)}),
        messages.Rates(2.0, 3.0, {"host": (4.0, 2.0)}),
    ]
    assert (
        cost_model.slowest_rank(ranks)
        == cost_model.slowest_rank(ranks[::-1])
        == messages.Rates(2.0, 4.0, {"host": (4.0, 5.0)})
    )


@settings(deadline=None)
@given(rates_, tiers, tokens_, st.integers(1, 9))
def test_longer_samples_are_kept_if_shorter_ones_are(
    rates: messages.Rates, tier: CopyTier, tokens: int, age: int
) -> None:
    """The break-even bandwidth falls with length; `break_even_tokens` is the crossover."""
    for choose in (why_not_store, why_not_resume):
        if not choose(rates, tier, tokens, age, None):
            assert not choose(rates, tier, 2 * tokens, age, None)
            assert not choose(rates, tier, tokens + 1, age, None)
    turn = cost_model.break_even_tokens(rates, tier)
    if turn is not None:  # but for the rounding of floats
        assert not why_not_store(rates, tier, turn + turn // 100 + 1, age, None)
        assert turn < 3 or why_not_store(rates, tier, turn - turn // 100 - 2, age, None) == "cheaper"


@settings(deadline=None)
@given(st.none() | rates_, tiers, tokens_, ages, bounds)
def test_stored_kv_is_always_worth_loading(
    rates: messages.Rates | None, tier: CopyTier, tokens: int, age: int, bound: int | None
) -> None:
    """The two decisions agree: with unchanged rates and version, no copy is wasted."""
    if not why_not_store(rates, tier, tokens, age, bound):
        assert not why_not_resume(rates, tier, tokens, age, bound)


@settings(deadline=None)
@given(st.none() | rates_, st.sampled_from(["device", "host", "disk"]), tokens_, ages, bounds)
def test_staleness_bound_and_same_version_override_cost(
    rates: messages.Rates | None, tier: cost_model.CopyTier, tokens: int, age: int, bound: int | None
) -> None:
    """They hold for any rates; with unknown rates, or a tier without one, KV is kept (`kv-policy`)."""
    why = why_not_resume(rates, tier, tokens, age, bound)
    if age <= 0:
        assert why == ""
    elif bound is not None and age > bound:
        assert why == "stale"
    elif rates is None or tier == "device" or tier not in rates.copy_s:
        assert why == ""
    else:
        assert (why == "cheaper") == (cost_model.recompute_s(rates, tokens) < cost_model.load_s(rates, tier, tokens))


def test_published_break_even_example() -> None:
    """Qwen3-0.6B at an effective 300 TFLOP/s, 4,096 tokens in 18 ms: kept over PCIe, recomputed rather than NVMe."""
    size, pcie, nvme = 114_688, 55e9, 12e9
    rates = messages.Rates(3.2e-6, 3e-10, {"host": (size / pcie, size / pcie), "disk": (size / nvme, size / nvme)})
    assert cost_model.recompute_s(rates, 4096) == pytest.approx(0.018, rel=0.03)
    assert why_not_store(rates, "host", 4096, 1, 5) == ""
    assert why_not_store(rates, "disk", 4096, 1, 5) == "cheaper"
    reported = cost_model.report(rates, size)
    assert reported is not None
    assert reported["tiers"]["host"]["out_gb_per_s"] == pytest.approx(55)
    assert 3000 < reported["tiers"]["host"]["break_even_tokens"] < 4096
    assert cost_model.report(None, size) is None
