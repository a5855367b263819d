"""Which partials give way when memory runs short (S6, S9): pure functions of lengths, orders and budgets in tokens."""

import pytest

from sglang_april.store.placement import by_worth, room_on_host
from sglang_april.types import Sample
from tests.unit.pure import Hand, names


def stored(*lengths: int) -> list[Sample]:
    """Suspended samples with so many tokens of KV, admitted in this order."""
    hand = Hand()
    samples = [g.samples[0] for g in hand.groups(*[1] * len(lengths))]
    for sample, length in zip(samples, lengths, strict=True):
        hand.begin(sample)
        hand.start(sample)
        hand.suspend(sample, pages=length)
    return samples


def never(sample: Sample) -> bool:
    return False


def test_the_short_give_way_before_the_long() -> None:
    """Design section 7: under a byte budget the longest samples are kept first."""
    assert names(by_worth(stored(30, 10, 20), never)) == ["g1.0", "g2.0", "g0.0"]


def test_among_equals_the_last_admitted_gives_way_first() -> None:
    """S6: newest first."""
    assert names(by_worth(stored(10, 10, 10), never)) == ["g2.0", "g1.0", "g0.0"]


def test_what_must_finish_gives_way_last() -> None:
    """S4: whatever its length."""
    samples = stored(1, 30, 20)
    assert names(by_worth(samples, lambda s: s is samples[0])) == ["g2.0", "g1.0", "g0.0"]


@pytest.mark.parametrize(
    ("cap", "evicted"),
    [(100, []), (60, []), (59, ["g0.0"]), (50, ["g0.0"]), (49, ["g0.0", "g1.0"]), (30, ["g0.0", "g1.0"]), (29, None)],
)
def test_as_few_as_needed_fall_back_to_tokens(cap: int, evicted: list[str] | None) -> None:
    """Design rule 5: a byte cap for the host tier; the cheapest go, and only until the newcomer fits."""
    *there, newcomer = stored(10, 20, 30)
    gone = room_on_host(newcomer, there, used=30, cap=cap)
    assert gone == evicted if gone is None else names(gone) == evicted


def test_a_newcomer_never_pushes_out_what_is_worth_more() -> None:
    """Design section 7: it falls back to its tokens itself."""
    (newcomer,) = stored(20)
    assert room_on_host(newcomer, [], used=90, cap=100) is None
    assert room_on_host(newcomer, [], used=80, cap=100) == []


def test_nothing_fits_a_tier_without_room() -> None:
    """Design rule 5: `--april-host-gb 0`."""
    *there, newcomer = stored(10, 20)
    assert room_on_host(newcomer, there, used=0, cap=0) is None
