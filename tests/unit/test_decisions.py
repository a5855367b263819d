"""Ranks that decide differently are detected at the first step that differs; ranks that decide alike never are."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_april.scheduler.decisions import MAX_TEXT, Decided, Decisions, PeerComparison, RanksDifferError


def sample(gid: int = 0, index: int = 0, length: int = 0, name: str = "p") -> Any:
    return SimpleNamespace(group=SimpleNamespace(gid=gid, id=name), index=index, length=length)


def digest(*decisions: Any) -> int:
    made = Decisions()
    for decision in decisions:
        made.add(*decision)
    return made.digest


def test_digest_depends_on_kind_order_samples_lengths_and_details() -> None:
    a, b = sample(1), sample(2)
    different = [
        digest(("start", [a, b])),
        digest(("start", [b, a])),
        digest(("start", [a])),
        digest(("start", [a]), ("start", [b])),
        digest(("resume", [a, b])),
        digest(("start", [a, sample(2, length=1)])),
        digest(("start", [a, sample(2, index=1)])),
        digest(("end round r", [])),
        digest(("end round r", [], ["p0"])),
        digest(("end round r", [], ["p1"])),
    ]
    assert len(set(different)) == len(different)
    assert digest(("start", [a, b])) == digest(("start", [sample(1), sample(2)]))


def test_step_without_a_decision_reports_nothing() -> None:
    decisions = Decisions()
    assert decisions.end_step(1) is None
    decisions.add("suspend", [sample(i, name=f"p{i}") for i in range(5)])
    assert decisions.end_step(2) == Decided(2, decisions.digest, "suspend p0[0] p1[0] p2[0] and 2 more")
    for _ in range(4):
        decisions.add("drop from " + "r" * 500, [sample(name="p" * 500)])
    reported = decisions.end_step(3)
    assert reported is not None
    assert len(reported.text) <= MAX_TEXT
    assert decisions.end_step(3) is None


Steps = st.dictionaries(st.integers(1, 12), st.sampled_from(("start", "suspend", "resume")))


def reports(steps: dict[int, str]) -> dict[int, Decided]:
    decisions, found = Decisions(), {}
    for step in sorted(steps):
        decisions.add(steps[step], [])
        decided = decisions.end_step(step)
        assert decided is not None
        found[step] = decided
    return found


def first_difference(own: dict[int, str], expected: dict[int, str]) -> int | None:
    return next((step for step in range(13) if own.get(step) != expected.get(step)), None)


@given(own=Steps, expected=Steps, same=st.booleans(), order=st.randoms())
def test_first_step_that_differs_is_named(
    own: dict[int, str], expected: dict[int, str], same: bool, order: Any
) -> None:
    """However the reports of the other rank and this rank's steps interleave."""
    expected = own if same else expected
    mine, others = reports(own), reports(expected)
    comparison, step, arrived = PeerComparison(1, 0), 0, sorted(others)
    sentence = None
    try:
        while step < 13 or arrived:
            if step < 13 and (not arrived or order.random() < 0.5):
                step += 1
                comparison.launched(step, mine.get(step))
            else:
                comparison.received(others[arrived.pop(0)])
    except RanksDifferError as error:
        sentence = str(error)
    differs = first_difference(own, expected)
    if differs is None:
        assert sentence is None
    elif sentence is None:
        assert not [step for step in expected if step >= differs], (
            "only own decisions follow; the next rank compares them"
        )
    else:
        assert sentence.startswith(f"TP ranks decided differently at step {differs}: rank 0 decided ")


def test_two_ranks_always_find_a_difference_between_them() -> None:
    """A decision that one rank alone made is found by the rank that it reports to."""
    lone = Decided(4, 9, "start p[0]")
    comparison = PeerComparison(1, 0)
    comparison.launched(4, None)
    with pytest.raises(RanksDifferError, match=r"step 4: rank 0 decided start p\[0\]; rank 1 decided nothing"):
        comparison.received(lone)
    comparison = PeerComparison(0, 1)
    comparison.launched(4, lone)
    with pytest.raises(RanksDifferError, match=r"step 4: rank 1 decided nothing; rank 0 decided start p\[0\]"):
        comparison.received(Decided(5, 1, "suspend p[0]")), comparison.launched(5, None)


def test_a_report_of_the_step_that_this_rank_is_about_to_note() -> None:
    """The thread that receives it gets the lock first; both ranks decided alike."""
    comparison, decided = PeerComparison(0, 1), Decided(4, 9, "start p[0]")
    arriving = [decided]

    class Contended:
        def __enter__(self) -> None:
            if arriving:
                comparison.received(arriving.pop())

        def __exit__(self, *_: object) -> None:
            pass

    comparison._lock = cast(threading.Lock, Contended())
    comparison.launched(4, decided)
    assert not arriving


def test_equal_words_with_different_digests_show_the_digests() -> None:
    comparison = PeerComparison(1, 0)
    comparison.launched(1, Decided(1, 1, "end round r (quota, 1 groups)"))
    with pytest.raises(RanksDifferError, match=r"digest 00000002.*digest 00000001"):
        comparison.received(Decided(1, 2, "end round r (quota, 1 groups)"))
