"""`concurrency: auto`: the tuner, and the effect of its limit on the scheduler."""

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_april.adapter.core.step_times import StepTimes
from sglang_april.api import messages
from sglang_april.scheduler.concurrency import FORGET_STEPS, ConcurrencyTuner
from sglang_april.scheduler.state import State
from tests.unit.controller_harness import Build, ControllerHarness

TUNING_STEPS = 128
Curve = Callable[[int], float]


def flat(batch: int) -> float:
    return 0.01


def linear(batch: int) -> float:
    return 0.001 * batch


def knee(batch: int) -> float:
    """Memory-bound up to 64 samples, then compute-bound."""
    return 0.01 * max(1.0, batch / 64)


def run(tuner: ConcurrencyTuner, curve: Curve, steps: int, noise: float = 0.0, seed: int = 0) -> list[int]:
    """The limits of an engine whose batch varies below the limit, as samples end one by one."""
    rng = random.Random(seed)
    limits = []
    for step in range(steps):
        batch = max(1, tuner.limit - rng.randrange(1 + tuner.limit // 12))
        hiccup = 50.0 if rng.random() < 0.02 else 1.0
        tuner.note(batch, curve(batch) * hiccup * (1 + noise * rng.gauss(0, 1)))
        if step % TUNING_STEPS == TUNING_STEPS - 1:
            limits.append(tuner.tune())
    return limits


@pytest.mark.parametrize(("curve", "least", "most"), [(flat, 256, 256), (linear, 1, 1), (knee, 64, 91)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_limit_settles_where_more_samples_stop_paying_off(
    curve: Curve, least: int, most: int, noise: float
) -> None:
    """Constant step time: all slots. Step time proportional to the batch: one sample."""
    for seed in range(5):
        limits = run(ConcurrencyTuner(256), curve, TUNING_STEPS * 40, noise, seed)
        settled = limits[20:]
        assert sum(least <= limit <= most for limit in settled) >= 0.9 * len(settled), limits


def test_the_reported_curve_includes_the_steps_that_the_limit_is_based_on() -> None:
    sent: list[messages.Tuned] = []
    batch: Any = SimpleNamespace(reqs=[None] * 48, forward_mode=SimpleNamespace(is_decode=lambda: True))
    times = StepTimes(SimpleNamespace(send=sent.append), 48)  # type: ignore[arg-type]
    for step in range(TUNING_STEPS + 1):
        times.boundary(step)
        times.launched(step + 1, batch)
    (tuned,) = sent
    assert [rows for rows, _ in tuned.step_ms] == [48.0]


def test_steps_on_both_sides_of_steps_without_a_limit_are_not_compared() -> None:
    sent: list[messages.Tuned] = []
    batch: Any = SimpleNamespace(reqs=[None] * 48, forward_mode=SimpleNamespace(is_decode=lambda: True))
    times = StepTimes(SimpleNamespace(send=sent.append), 48)  # type: ignore[arg-type]
    for step in range(TUNING_STEPS):
        times.boundary(step)
        times.launched(step + 1, batch)
    assert list(times._tuner._newest)
    times.boundary(TUNING_STEPS + 7)
    assert not list(times._tuner._newest)


def test_a_smaller_batch_is_tried_once() -> None:
    """Without a comparison, the gain of the largest level is unknown."""
    tuner = ConcurrencyTuner(64)
    assert tuner.tune() == 64
    limits = run(tuner, flat, TUNING_STEPS * 30)
    assert limits[0] == 45
    assert set(limits[2:]) == {64}


def test_old_measurements_expire() -> None:
    """Contexts grow and steps with them: the limit follows, in both directions."""
    tuner = ConcurrencyTuner(64)
    assert run(tuner, flat, TUNING_STEPS * 10)[-1] == 64
    assert run(tuner, linear, FORGET_STEPS + TUNING_STEPS * 20)[-1] == 1
    assert 64 in run(tuner, flat, 2 * FORGET_STEPS + TUNING_STEPS * 40)


def test_drifting_machine_speed_does_not_move_the_limit() -> None:
    """The speed of a shared machine halves and recovers while the batch varies; the limit stays at all slots."""
    for period in (9000, 18_000, 36_000):
        rng, tuner, limits = random.Random(period), ConcurrencyTuner(64), []
        for step in range(60_000):
            speed = 1.5 + 0.5 * math.sin(2 * math.pi * step / period)
            batch = tuner.limit - rng.randrange(1 + tuner.limit // 5)
            tuner.note(batch, speed * (0.0042 + 0.00016 * batch))
            if step % TUNING_STEPS == TUNING_STEPS - 1:
                limits.append(tuner.tune())
        assert limits.count(64) >= 0.9 * len(limits), (period, limits)


@pytest.mark.parametrize(("pauses", "then"), [(False, 32), (True, 64)])
def test_steps_before_a_pause_are_not_compared(pauses: bool, then: int) -> None:
    """In between, other rounds or none used the engine. Compared, the larger batch would seem to have a negative gain;
    not compared, it is tried again."""
    tuner = ConcurrencyTuner(64)
    assert run(tuner, linear, TUNING_STEPS) == [45]
    if pauses:
        tuner.pause()
    assert run(tuner, flat, TUNING_STEPS) == [then]


def test_rounds_too_short_for_a_comparison_have_all_slots() -> None:
    """With a pause after every hundred steps there is no comparison: the smaller level is tried once."""
    tuner, limits = ConcurrencyTuner(64), []
    for step in range(TUNING_STEPS * 40):
        if step % 100 == 0:
            tuner.pause()
        tuner.note(tuner.limit, flat(tuner.limit))
        if step % TUNING_STEPS == TUNING_STEPS - 1:
            limits.append(tuner.tune())
    assert limits.count(45) == 1
    assert limits.count(64) == 39


def test_a_move_that_does_not_change_the_batch_measures_nothing() -> None:
    """With fewer samples than the limit, the smaller one is tried once and left."""
    tuner, limits = ConcurrencyTuner(64), []
    for step in range(TUNING_STEPS * 20):
        tuner.note(20, 0.01)
        if step % TUNING_STEPS == TUNING_STEPS - 1:
            limits.append(tuner.tune())
    assert limits[:3] == [45, 64, 64]
    assert set(limits[2:]) == {64}


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7, 300])
def test_limits_for_any_number_of_slots(slots: int) -> None:
    assert (
        1
        <= min(run(ConcurrencyTuner(slots), linear, TUNING_STEPS * 60))
        <= max(run(ConcurrencyTuner(slots), flat, TUNING_STEPS * 60))
        == slots
    )


# --- in the controller


def tuned(w: ControllerHarness, limit: int) -> None:
    w.do(lambda engine: engine.controller.observe(messages.Tuned(limit, [(float(limit), 2.5)])))


def running(w: ControllerHarness) -> int:
    return w.ledger.runs["run"].running


def many(count: int, length: int) -> dict[str, tuple[int, int, int]]:
    return {f"p{i}": (2, 1, -length) for i in range(count)}


def test_auto_takes_all_slots_before_the_first_limit(harness: Build) -> None:
    w = harness(slots=8)
    w.open("run", many(30, 4), quota=None, concurrency="auto")
    w.step()
    assert running(w) == 8
    tuned(w, 3)
    most = []
    while w.rounds:
        w.step()
        most.append(running(w))
    assert max(most[8:]) == 3
    assert (w.replies[-1].stats["concurrency"], w.replies[-1].stats["step_ms"]) == (3, [[3.0, 2.5]])


def test_a_new_limit_suspends_no_running_sample(harness: Build) -> None:
    """Samples beyond the limit keep running, and none is admitted until fewer run; repeating it changes nothing."""
    w = harness(slots=8)
    w.open("run", many(8, 40) | {"next": (2, 1, -3)}, quota=None, concurrency="auto")
    w.step(5)
    for _ in range(2):
        tuned(w, 2)
        w.step(3)
        assert running(w) == 8
        assert not w.ledger.runs["run"].suspended
    assert w.sample("run", "next").state is State.QUEUED
    tuned(w, 8)
    assert len(w.reply().deliver) == 9


def test_the_limit_holds_for_later_rounds_with_auto_only(harness: Build) -> None:
    w = harness(slots=8)
    tuned(w, 2)
    w.open("run", many(20, 6), quota=3, concurrency="auto")
    w.step(2)
    assert running(w) == 2
    w.reply()
    w.open("run", {}, quota=3, concurrency=5)
    w.step(3)
    assert running(w) == 5
    assert w.reply().stats["step_ms"] is None
    w.open("run", {}, quota=None)
    w.step(3)
    assert running(w) == 8


def test_the_limit_applies_to_running_ahead(harness: Build) -> None:
    """`after_quota: continue`: the observation comes while no round is open."""
    w = harness(slots=8)
    w.open("run", many(50, 9), quota=1, ahead=40, concurrency="auto", after_quota="continue")
    w.reply()
    tuned(w, 2)
    w.step(12)
    assert running(w) == 2


def test_state_reports_the_tuned_limit(harness: Build) -> None:
    w = harness()
    reported: list[object] = []
    for limit in (None, 4):
        if limit is not None:
            tuned(w, limit)
        reported.append(w.command(messages.GetState).data["tuned"])
    assert reported == [None, {"concurrency": 4, "step_ms": [(4.0, 2.5)]}]


def test_the_limit_is_broadcast_as_an_observation() -> None:
    tuned = messages.Tuned(3, [(2.5, 1.25)])
    reported = messages.decode_message(messages.encode(tuned))
    assert isinstance(reported, messages.Observation)
    assert reported == tuned
    assert msgspec.msgpack.decode(messages.encode(tuned))["concurrency"] == 3
