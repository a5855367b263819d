"""bench.rollout: client-side variants of a round."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from bench.rollout.baselines import Outside, OutsideRetry
from bench.rollout.engine_client import Counters
from bench.rollout.in_flight import Asynchronous, InFlight, PauseInPlace, PauseRetract
from bench.rollout.lengths import named
from bench.rollout.metrics import Block, check_identity, round_metrics
from bench.rollout.variant import RoundResult
from bench.rollout.workload import Stream
from tests.unit.round_fixtures import ANY, PLAN, counters, measured


class OneAtATime:
    """An engine in which the third request hangs until it is aborted, with one token; the others finish."""

    patched = False

    def __init__(self) -> None:
        self.waiting: list[asyncio.Event] = []
        self.aborted = False

    async def post(self, route: str, body: dict[str, Any]) -> Any:
        event = asyncio.Event()
        self.waiting.append(event)
        if len(self.waiting) != 3:
            event.set()
        await event.wait()
        answers = []
        for params in body["sampling_params"]:
            count = 1 if self.aborted else params["max_new_tokens"]
            meta = {"prompt_tokens": 3, "cached_tokens": 0}
            answers.append({"output_ids": [7] * count, "meta_info": meta})
        return answers

    async def abort_all(self) -> None:
        self.aborted = True
        for event in self.waiting:
            event.set()

    async def counters(self) -> Counters:
        return counters(0, 0, 0, 0)


def test_client_side_rounds_carry_surplus_and_partials_and_lose_nothing() -> None:
    async def scene() -> tuple[RoundResult, RoundResult, Outside]:
        stream = Stream(0, named("constant", 5, 9), 2, 3)
        variant = Outside(OneAtATime(), replace(PLAN, over_sampling=3.0), stream)  # type: ignore[arg-type]
        first = await variant.round()
        variant.engine.aborted = False  # type: ignore[attr-defined]
        return first, await variant.drain(), variant

    first, last, variant = asyncio.run(scene())
    assert [group.lengths for group in first.groups] == [[5, 5]]
    assert (first.generated, first.carry) == (10 + 10 + 2, 10 + 2)  # the second to finish is surplus, the third cut
    assert check_identity([Block(0, [measured(first), measured(last)])])
    assert sorted(variant.delivered) == [f"p{i}/{j}" for i in range(3) for j in range(2)]
    assert last.reprefilled == 6


@pytest.mark.parametrize("kind", [PauseInPlace, PauseRetract, Asynchronous])
def test_prefills_that_only_a_rest_causes_are_not_counted(kind: type[InFlight]) -> None:
    """The answer to a request of a rested group arrives in a measured round, with all its earlier tokens prefilled."""
    lengths = named("constant", 5, 9)
    variant = kind(ANY, PLAN, Stream(0, lengths, 2, 3))
    variant._begin()
    (group,) = variant._new(1)
    variant._take(group, 0, 2, {"output_ids": [7] * 3, "meta_info": {"prompt_tokens": 5, "cached_tokens": 0}})
    done = variant._deliver(0)
    assert done.reprefilled is None
    done.carry = 3
    row = round_metrics([Block(0, [measured(done)])], PLAN, lengths, [1.0])
    assert row["reprefilled_tokens"] is None


def test_pause_variant_replaces_rejected_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = named("lognormal", 8, 40)
    variant = PauseInPlace(ANY, replace(PLAN, filtered=True, groups=3), Stream(0, lengths, 2, 4))
    monkeypatch.setattr(variant, "_start", lambda group: variant.tasks.update({cast(Any, object()): group}))
    variant._fill(variant._target)
    assert len(variant.tasks) == 6
    variant.pile.append(variant.tasks.popitem()[1])  # one has passed
    variant.refill()
    assert (len(variant.tasks), variant.stream.taken) == (5, 6)
    variant.tasks.popitem()  # one was rejected
    variant.refill()
    assert (len(variant.tasks), variant.stream.taken) == (5, 7)


def test_slime_round_end_polls_the_load_until_it_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted request runs for one more step: the first query of the load nearly always sees it."""
    engine, slept = OneAtATime(), []
    loads = iter([counters(0, 3, 0, 7), counters(0, 2, 0, 7), counters(0, 0, 0, 7, waiting=1), counters(0, 0, 0, 7)])

    async def read_counters() -> Counters:
        return next(loads)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def scene() -> RoundResult:
        stream = Stream(0, named("constant", 5, 9), 2, 3)
        return await OutsideRetry(engine, replace(PLAN, over_sampling=3.0), stream).round()  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "counters", read_counters)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert len(asyncio.run(scene()).groups) == 1
    assert slept == [3.0, 3.0]
