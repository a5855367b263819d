"""Verdicts that do not arrive: told again where that may help, else the round ends at once, for its engine waits."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_april.client import AprilError
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.bridge import fake_engine_pool
from tests.bridge.test_engine_pool import body, fleet
from tests.bridge.test_engine_pool import rollouts as of_several
from tests.bridge.test_rollout import FakeEngine, finished, ids
from tests.bridge.test_rollout import rollouts as of_one
from trainer_bridge.rewards import Score
from trainer_bridge.rollout import ScoredRollout

PATIENCE_S = 60.0
CLOSED = httpx.RemoteProtocolError("Server disconnected without sending a response.")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.gone = True


def in_time(call: Callable[[], ScoredRollout]) -> ScoredRollout:
    """Its value; a call that waits for ever fails its test alone."""
    done: Future[ScoredRollout] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised below
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(PATIENCE_S)


def test_a_verdict_on_a_connection_that_was_just_closed_is_told_again(engine: FakeEngine, tmp_path: Path) -> None:
    engine.refusals = [CLOSED, CLOSED]
    made = of_one(engine, tmp_path, ["ok"] * 9, over_sampling_batch_size=2, dynamic_sampling=True)
    assert ids(in_time(lambda: made.round("r.1", 2))) == ["e0-0", "e0-1"]
    assert engine.judged == 4


@pytest.mark.parametrize("refusals", [[AprilError(500, "server", "a fault")], [CLOSED] * 3])
def test_a_verdict_that_is_lost_ends_the_round_and_the_engine_is_not_waited_for(
    engine: FakeEngine, tmp_path: Path, refusals: list[Exception]
) -> None:
    """The engine waits for this very verdict, so that its stream would never end."""
    engine.refusals = list(refusals)
    made = of_one(engine, tmp_path, ["ok"] * 9, over_sampling_batch_size=2, dynamic_sampling=True)
    before = made._data.position
    with pytest.raises(type(refusals[0])):
        in_time(lambda: made.round("r.1", 2))
    assert engine.judged == len(refusals)
    assert (made.pending, made._data.position) == ({}, before)


class Talking:
    """An engine that refuses all verdicts and goes on showing groups, when it may."""

    def __init__(self, shown: int) -> None:
        self.shown, self.goes_on, self.asked_for_more, self.left = shown, *(threading.Event() for _ in range(3))

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        try:
            for prompt in body["prompts"][: self.shown]:
                yield finished(prompt)
            assert self.goes_on.wait(PATIENCE_S)
            yield finished(body["prompts"][self.shown])
            self.asked_for_more.set()
        finally:
            self.left.set()

    def judge(self, round_id: str, accept: list[str], reject: list[str]) -> None:
        raise AprilError(500, "server", "a fault")


def test_after_a_lost_verdict_the_rewards_of_other_groups_are_not_waited_for(tmp_path: Path) -> None:
    """They are scored in order: the first reward comes when the second group is there too, whose reward never comes."""
    engine: Any = Talking(shown=2)
    made = of_one(engine, tmp_path, ["ok"] * 9, over_sampling_batch_size=3, dynamic_sampling=True)
    first: Future[list[Score]] = Future()
    second: Future[list[Score]] = Future()

    def submit(_: Any, prompt: Any) -> "Future[list[Score]]":
        if prompt.id == "e0-0":
            return first
        threading.Timer(0.2, first.set_result, [[Score(0.0), Score(1.0)]]).start()
        return second

    made._rewards.submit = submit  # type: ignore[method-assign]
    with pytest.raises(AprilError, match="a fault"):
        in_time(lambda: made.round("r.1", 2))
    engine.goes_on.set()


def test_a_stream_is_left_where_its_round_has_failed(tmp_path: Path) -> None:
    """Over several engines going on would count and stop for a round that may have been asked for again."""
    engine: Any = Talking(shown=1)
    made = of_one(engine, tmp_path, ["ok"] * 9, over_sampling_batch_size=3, dynamic_sampling=True)
    with pytest.raises(AprilError, match="a fault"):
        in_time(lambda: made.round("r.1", 2))
    engine.goes_on.set()
    assert engine.left.wait(PATIENCE_S)
    assert not engine.asked_for_more.is_set()


# --- over several engines


@pytest.mark.parametrize("call", ["judge", "stop"])
def test_a_call_that_a_verdict_brought_about_and_that_failed_is_made_again(tmp_path: Path, call: str) -> None:
    """The verdict is told again as a whole: what it settled before it failed is not taken for done."""
    engines = [fake_engine_pool.FakeEngine(), fake_engine_pool.FakeEngine()]
    real, failures = getattr(engines[1], call), [CLOSED]

    def flaky(*args: Any, **fields: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **fields)

    setattr(engines[1], call, flaky)
    engines[0].may_finish = 2
    made = of_several(engines, tmp_path, over_sampling_batch_size=8, dynamic_sampling=True)
    assert len(in_time(lambda: made.round("run.1", 4)).groups) == 4
    assert not failures


@pytest.mark.parametrize(("fit", "delivered"), [(False, {"a1": True, "a2": False}), (True, {"a2": True})])
def test_a_verdict_that_waits_for_room_is_not_lost_with_the_call_that_would_tell_it(
    fit: bool, delivered: dict[str, bool]
) -> None:
    """a1 is fit, and waits for a2, which is at its bound; the verdict on a2 settles both, and fails on its way."""
    made, engines = fleet(1)
    engines[0].mandatory = {"a2"}
    judge, failures = engines[0].judge, [CLOSED]

    def flaky(round_id: str, accept: Sequence[str] = (), reject: Sequence[str] = ()) -> dict[str, int]:
        if accept and failures:
            raise failures.pop()
        return judge(round_id, accept, reject)

    engines[0].judge = flaky  # type: ignore[method-assign]
    events = made.stream(**body("r.1", "a1 a2", 1, count="accepted"))
    next(events), next(events)
    made.judge("r.1", accept=["a1"])
    assert engines[0].verdicts == {}
    verdict = {"accept" if fit else "reject": ["a2"]}
    with pytest.raises(httpx.TransportError):
        made.judge("r.1", **verdict)
    made.judge("r.1", **verdict)
    summary = next(events)
    assert isinstance(summary, RolloutSummary)
    assert {named["id"]: named["accepted"] for named in summary.delivered} == delivered


def test_a_stream_that_was_given_up_does_not_end_the_one_that_was_asked_for_again() -> None:
    made, engines = fleet(1)
    engines[0].may_finish = 1
    asked = body("r.1", "a1 a2", 2, count="accepted")
    old, new = made.stream(**asked), made.stream(**asked)
    next(old), next(new)
    old.close()  # type: ignore[attr-defined]
    made.judge("r.1", ["a1"])
    assert engines[0].verdicts == {"a1": True}
