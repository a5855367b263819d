"""`VersionClock`: one version per push."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_april.api.errors import RequestError
from sglang_april.scheduler.version_clock import VersionClock


def call(clock: VersionClock, forwards: int = 0, *, ok: bool = True, whole: bool = False, **options: Any) -> bool:
    """A weight call as the adapter makes it: a refused one does not reach SGLang."""
    refusal = clock.refusal(options.get("named"))
    message = refusal or ("" if ok else "bad tensor")
    return clock.weight_call(ok and not refusal, message, forwards, whole=whole, refused=bool(refusal), **options)


def refused(status: int, act: "object", *args: int | None) -> str:
    with pytest.raises(RequestError) as caught:
        act(*args)  # type: ignore[operator]
    assert caught.value.status == status
    return caught.value.reason


def test_the_version_starts_at_the_value_of_the_flag() -> None:
    assert VersionClock().version == 0
    assert VersionClock(7).version == 7


def test_ten_buckets_between_begin_and_end_move_the_version_once_at_the_end() -> None:
    clock = VersionClock()
    clock.begin(None)
    assert "push is open" in clock.closed
    for forwards in range(10):
        assert not call(clock, forwards)
    assert clock.version == 0
    assert clock.end(None) == 1
    assert (clock.version, clock.closed) == (1, "")


def test_a_push_without_any_call_moves_the_version_too() -> None:
    """The trainer may transfer the weights by other means."""
    clock = VersionClock()
    clock.begin(None)
    assert clock.end(None) == 1


def refuse(clock: VersionClock, forwards: int) -> None:
    """SGLang or the plugin refuses a weight call before it has changed anything."""
    assert not clock.weight_call(False, "flush_cache needs an idle engine", forwards, whole=False, refused=True)


def test_a_refused_weight_call_of_no_push_changes_nothing() -> None:
    clock = VersionClock(3)
    refuse(clock, 5)
    assert (clock.version, clock.closed) == (3, "")
    assert call(clock, 5)
    assert clock.version == 4


def test_a_refused_bucket_is_missing_from_its_push() -> None:
    clock = VersionClock(3)
    assert call(clock, 5)
    refuse(clock, 5)
    assert "updated only in part" in clock.closed, "an earlier bucket has been applied"
    clock.begin(None)
    refuse(clock, 5)
    assert "start it again" in refused(409, clock.end, None)


@pytest.mark.parametrize(("at_begin", "at_end", "becomes"), [(9, None, 9), (None, 9, 9), (9, 12, 12), (None, None, 4)])
def test_begin_or_end_names_the_version(at_begin: int | None, at_end: int | None, becomes: int) -> None:
    clock = VersionClock(3)
    clock.begin(at_begin)
    assert clock.end(at_end) == becomes
    clock.begin(None)
    assert clock.end(None) == becomes + 1, "a name is used once"


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_version_that_is_not_greater_is_refused_and_changes_nothing(version: int) -> None:
    clock = VersionClock(3)
    assert "3" in refused(409, clock.begin, version)
    assert not clock.open
    clock.begin(None)
    refused(409, clock.end, version)
    assert clock.open
    assert clock.end(None) == 4


def test_end_without_begin_is_refused() -> None:
    clock = VersionClock(3)
    assert "begin" in refused(409, clock.end, None)
    clock.begin(None)
    clock.end(None)
    refused(409, clock.end, None)
    assert clock.version == 4


def test_begin_while_one_is_open_starts_over() -> None:
    clock = VersionClock()
    clock.begin(5)
    call(clock, ok=False)
    clock.begin(None)
    assert "open" in clock.closed
    assert clock.end(None) == 1, "neither the failure nor the name of the first begin counts"


def test_a_failed_call_keeps_admission_closed_until_a_push_succeeds() -> None:
    clock = VersionClock()
    clock.begin(None)
    call(clock)
    call(clock, ok=False)
    call(clock)
    assert "bad tensor" in clock.closed
    assert "bad tensor" in refused(409, clock.end, None)
    assert (clock.version, clock.open) == (0, True)
    clock.begin(None)
    assert clock.end(None) == 1
    assert clock.closed == ""


def test_a_begin_never_ended_keeps_admission_closed() -> None:
    clock = VersionClock()
    clock.begin(None)
    assert "/april/push/end" in clock.closed


def test_without_begin_the_first_accepted_call_after_a_forward_moves_the_version() -> None:
    clock = VersionClock()
    assert call(clock, 5)
    assert not call(clock, 5), "further calls before the next forward belong to the same push"
    assert not call(clock, 5)
    assert clock.version == 1
    assert call(clock, 6)
    assert clock.version == 2


def test_without_begin_a_failed_bucket_closes_admission_and_another_bucket_does_not_heal_it() -> None:
    clock = VersionClock()
    assert not call(clock, 5, ok=False)
    assert not call(clock, 6)
    assert (clock.version, bool(clock.closed)) == (0, True)
    assert call(clock, 6, whole=True), "a whole policy does"
    assert (clock.version, clock.closed) == (1, "")


def test_a_failure_after_the_version_moved_is_healed_by_the_next_whole_push() -> None:
    clock = VersionClock()
    call(clock, 5)
    call(clock, 5, ok=False)
    assert clock.closed
    assert call(clock, 5, whole=True)
    assert (clock.version, clock.closed) == (2, "")


def test_a_weight_call_before_begin_is_a_push_of_its_own() -> None:
    """What came before `begin` is a push of its own."""
    clock = VersionClock()
    call(clock, 5)
    clock.begin(None)
    call(clock, 5)
    assert clock.end(None) == 2
    assert not clock.closed


actions = st.one_of(
    st.tuples(st.just("begin"), st.none() | st.integers(0, 30)),
    st.tuples(st.just("end"), st.none() | st.integers(0, 30)),
    st.tuples(st.just("call"), st.booleans()),
    st.tuples(st.just("forward"), st.none()),
)


@given(st.lists(actions, max_size=40))
def test_the_version_rises_once_per_push_and_never_falls(
    steps: list[tuple[str, int | None]],
) -> None:
    """Any order of messages: at most one increment per message, none while closed."""
    clock, forwards = VersionClock(), 0
    for name, value in steps:
        before, closed = clock.version, clock.closed
        try:
            if name == "begin":
                clock.begin(value)
                assert clock.open
            elif name == "end":
                assert clock.end(value) == clock.version > before
                assert not closed or "open" in closed
                assert value is None or clock.version == value
            elif name == "call":
                moved = call(clock, forwards, ok=bool(value))
                assert moved == (clock.version == before + 1)
                assert not (moved and clock.closed)
                assert value or clock.closed
            else:
                forwards += 1
        except RequestError:
            assert (clock.version, clock.closed) == (before, closed)
        if name != "end":
            assert clock.version - before in (0, 1)
        if name in ("begin", "forward"):
            assert clock.version == before


def test_calls_that_name_a_version_move_to_it_once() -> None:
    """slime sends the number of its push in every bucket; stock requests may run between two of them."""
    clock = VersionClock()
    assert call(clock, 5, named=7)
    assert not call(clock, 5, named=7)
    assert not call(clock, 5), "a call without a name belongs to the same push until a forward"
    assert not call(clock, 6, named=7)
    assert (clock.version, clock.closed) == (7, "")
    assert call(clock, 9, named=8)
    assert call(clock, 10)
    assert clock.version == 9


def test_an_older_name_is_refused_and_changes_nothing() -> None:
    clock = VersionClock(7)
    assert "weight_version is 6" in clock.refusal(6)
    assert not call(clock, 5, named=6, whole=True)
    assert call(clock, 5, named=8)
    assert not call(clock, 5, named=6), "nor directly behind an accepted call"
    assert (clock.version, clock.closed) == (8, "")


def test_names_within_begin_and_end() -> None:
    clock = VersionClock(3)
    clock.begin(None)
    assert not call(clock, 5, named=9)
    assert clock.version == 3
    assert clock.end(None) == 9
    clock.begin(12)
    assert "version 12" in clock.refusal(13)
    assert not call(clock, 5, named=13)
    assert "weight_version is 13" in refused(409, clock.end, None)


def test_a_named_update_heals_mixed_weights_only_with_a_greater_version() -> None:
    """Stock requests may have left KV of the mixed weights under the version at which a bucket failed."""
    clock = VersionClock(3)
    assert call(clock, 5, named=4)
    assert not call(clock, 5, ok=False, named=4)
    assert not call(clock, 6, named=4, whole=True)
    assert not call(clock, 6, named=5), "the last bucket of a push cannot be recognised"
    assert "updated only in part" in clock.closed
    assert call(clock, 6, named=5, whole=True)
    assert (clock.version, clock.closed) == (5, "")


@pytest.mark.parametrize(
    ("whole", "paused", "heals"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_named_call_names_the_version_after_a_restart(whole: bool, paused: bool, heals: bool) -> None:
    clock = VersionClock(7, unnamed=True)
    assert not call(clock, 5, named=6, whole=whole, paused=paused), "not below the journal's"
    assert call(clock, 5, named=7, whole=whole, paused=paused) is heals
    assert clock.version == 7


@pytest.mark.parametrize("begin", [7, None])
def test_lost_weights_are_pushed_again_under_the_same_version_or_the_next(begin: int | None) -> None:
    clock = VersionClock(7, lost=True)
    assert "weights are lost" in clock.closed
    clock.begin(begin)
    assert not call(clock, 5, named=begin)
    assert clock.end(None) == (begin or 8)


@pytest.mark.parametrize("how", [{"whole": True}, {"paused": True}])
def test_a_weight_call_replaces_lost_weights_if_its_push_has_an_end(how: dict[str, bool]) -> None:
    """The last bucket of a push without begin and end is not known."""
    clock = VersionClock(7)
    assert call(clock, 5)
    clock.lost = True
    assert not call(clock, 5)
    assert not call(clock, 5, named=9)
    assert (clock.version, "push/begin and push/end" in clock.closed) == (8, True)
    assert call(clock, 5, **how), "no forward since the push before"
    clock.lost = False  # as the caller does when the version has moved
    assert not call(clock, 5, **how)
    assert (clock.version, clock.closed) == (9, "")
    clock.lost = True
    assert "weight_version is 8" in clock.refusal(8)
    assert call(clock, 5, named=9, **how)
    assert clock.version == 9


def test_a_bucket_without_a_name_names_no_version_under_a_pause() -> None:
    clock = VersionClock(7, unnamed=True)
    assert not call(clock, 5, paused=True)
    assert clock.closed
