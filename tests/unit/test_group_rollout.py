"""Rollouts of slime's kind on fake engines; tests/integration/test_slime.py has them with the trainer's own functions
and a live server."""

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_april.client import AprilError
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.types import RolloutGroup, RolloutSummary
from sglang_april.integrations.framework import Framework
from sglang_april.integrations.group_rollout import Rollouts, _Rollout
from tests.bridge.fake_engine_pool import FakePoolEngine, group
from tests.support.live import until


class FakeFramework:
    """A trainer whose groups have one sample."""

    package = "trainer"
    filters = SimpleNamespace(
        MetricGatherer=lambda: SimpleNamespace(collect=dict, on_dynamic_filter_drop=lambda reason: None)
    )

    def __init__(self, drop_reason: Callable[[int], str | None] = lambda _: None) -> None:
        """`drop_reason`: of the group with this index."""
        self._drop_reason = drop_reason

    def drop_reason(self, _args: Namespace, samples: list[Any], _remaining: int) -> str | None:
        return self._drop_reason(samples[0].index)

    def prompt_id(self, group: int) -> str:
        return str(group)

    def to_prompt(self, group: int, *_: Any) -> dict[str, Any]:
        return {"id": str(group), "n": 1}

    def sampling_params(self, _args: Namespace) -> dict[str, Any]:
        return {}

    def to_group(self, _args: Namespace, finished: RolloutGroup, *_: Any) -> list[Any]:
        return [SimpleNamespace(index=int(finished.id), response_length=2, reward=None)]

    async def reward(self, _args: Namespace, samples: list[Any]) -> list[Any]:
        for sample in samples:
            sample.reward = 1.0
        return samples

    def TrainOutput(self, samples: Any, metrics: Any) -> Any:  # noqa: N802
        return SimpleNamespace(samples=samples, metrics=metrics)


class FakeEnginePool:
    """Engines that have an accepted group of an earlier rollout, which meets the quota at once."""

    clients: tuple[()] = ()

    def partials(self, _run: str) -> dict[str, list[Any]]:
        return {"groups": [{"id": "7"}]}

    def stream(self, **_body: Any) -> Iterator[RolloutSummary]:
        carried = replace(group("7"), accepted=True)
        yield RolloutSummary("r", "trainer", 1, "quota", [], {"groups": 0, "tokens": 0}, {}, [carried])


class FakeDataSource:
    """Groups are their indices."""

    def __init__(self) -> None:
        self.position = 0

    def __call__(self, count: int) -> list[int]:
        self.position += count
        return list(range(self.position - count, self.position))


def test_dropped_group_is_replaced_by_the_engine_that_has_not_ended() -> None:
    """Group 0 was all that engine 0 had; groups 2 and 3 replace group 1."""
    engines = [FakePoolEngine(), FakePoolEngine()]
    engines[1].may_finish = 0

    def drop_reason(index: int) -> str | None:
        if index == 0:
            with engines[1].changed:
                engines[1].may_finish = 9
                engines[1].changed.notify_all()
        if index == 1:
            until(lambda: all(entry.ended for entry in engines[0].rounds.values()), "the round has ended at engine 0")
        return "odd" if index == 1 else None

    args = Namespace(over_sampling_batch_size=2, rollout_batch_size=2, partial_rollout=True)
    pool, source, unsent = EnginePool(engines), FakeDataSource(), list[Any]()  # type: ignore[arg-type]
    delivered = list[int]()
    framework: Any = FakeFramework(drop_reason)
    for rollout_id in range(2):
        rollout = _Rollout(framework, pool, None, args, rollout_id, source, unsent)  # type: ignore[arg-type]
        delivered += [samples[0].index for samples in asyncio.run(rollout.run(set())).samples]
        assert not unsent
    assert sorted(delivered) == [0, 2, 3, 4]
    assert sorted(engines[0].delivered + engines[1].delivered) == ["0", "1", "2", "3", "4"]


def test_rounds_have_no_staleness_bound() -> None:
    """Groups at a bound are delivered beyond the quota: after a few rounds more than the trainer takes."""
    args, engines = (
        Namespace(over_sampling_batch_size=2, rollout_batch_size=2, partial_rollout=True),
        [FakePoolEngine()],
    )
    made: Any = (FakeFramework(), EnginePool(engines), None, args, 0, FakeDataSource(), [])  # type: ignore[arg-type]
    asyncio.run(_Rollout(*made).run(set()))
    assert engines[0].bodies[0]["max_staleness"] is None


@pytest.mark.parametrize("error", [AprilError(409, "round_id", "has ended"), asyncio.CancelledError()])
def test_replacements_that_no_engine_takes_wait_for_the_next_rollout(error: BaseException) -> None:
    def refuse(*_: Any) -> None:
        raise error

    unsent, pool = list[Any](), SimpleNamespace(extend=refuse)
    args: Any = Namespace(over_sampling_batch_size=3, rollout_batch_size=2)
    made: Any = (FakeFramework(), pool, None, args, 0, FakeDataSource(), unsent)
    rollout = _Rollout(*made)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(rollout._extend(rollout._take(3)))
    assert [prompt["id"] for prompt in unsent] == ["0", "1", "2"]
    assert rollout._remaining == 0


def test_group_accepted_before_a_restart_is_delivered_with_its_reward() -> None:
    """The engine keeps the verdict of a rollout that was cut off, and shows no preview of the group again."""
    args = Namespace(over_sampling_batch_size=1, rollout_batch_size=1, partial_rollout=True)
    made: Any = (FakeFramework(), FakeEnginePool(), None, args, 0, lambda _groups: [], [])
    output = asyncio.run(_Rollout(*made).run(set()))
    assert [[sample.index for sample in samples] for samples in output.samples] == [[7]]
    assert output.samples[0][0].reward == 1.0


@pytest.mark.parametrize("evaluation", [False, True])
def test_call_without_arguments_is_refused_with_a_sentence(evaluation: bool) -> None:
    """slime's contract check of outputs makes such calls."""
    framework: Any = FakeFramework()
    with pytest.raises(ValueError, match="args is None: the router"):
        Rollouts(framework).generate_rollout(None, 2, object(), evaluation)  # type: ignore[arg-type]


def test_groups_of_a_data_source_without_group_index_have_different_ids() -> None:
    """slime's own rollouts do not read `group_index`, and the data sources of its contract tests set none."""
    groups = [
        [SimpleNamespace(group_index=index, index=2 * i) for _ in range(2)] for i, index in enumerate([None, None, 2])
    ]
    assert [Framework.prompt_id(group) for group in groups] == ["sample-0", "sample-2", "2"]
    with pytest.raises(ValueError, match="neither group_index nor index"):
        Framework.prompt_id([SimpleNamespace(group_index=None, index=None)])


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("rollout_top_p", 0.9, "--rollout-top-p must be 1"),  # slime's own rollout would send custom_params
        ("custom_generate_function_path", "m.f", "attach them to a run"),
        ("use_rollout_routing_replay", True, "routed experts"),
        ("use_rollout_indexer_replay", True, "--use-rollout-indexer-replay is not supported"),
        ("recompute_logprobs_via_prefill", True, "decode steps"),
        ("opd_log_prob_top_k", 8, "no top logprobs"),
        ("use_miles_router", True, "does not list its engines"),
    ],
)
def test_arguments_that_a_round_cannot_honour_are_refused(field: str, value: object, reason: str) -> None:
    framework: Any = FakeFramework()
    args = Namespace(**{"rollout_top_p": 1.0, field: value})
    with pytest.raises(ValueError, match=reason):
        Rollouts(framework).generate_rollout(args, 0, object(), False)


@dataclass
class FakeSample:
    """The fields of a sample that `to_prompt` reads."""

    prompt: str = ""
    group_index: int | None = None
    index: int | None = None
    label: str = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: None = None
    generate_function_path: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({}, ""),
        ({"label": "7"}, "group 3: its samples differ in more than the index"),
        ({"prompt": "q"}, "its samples differ"),
        ({"tokens": [1]}, "tokens of a sample is not supported"),
        ({"generate_function_path": "m.f"}, "generate_function_path of a sample is not supported"),
    ],
)
def test_groups_that_one_prompt_cannot_carry_are_refused(second: dict[str, Any], reason: str) -> None:
    """The samples of a group are rebuilt from one prompt: what only one of them has would be lost."""
    framework = object.__new__(Framework)
    framework.Sample = FakeSample
    tokenizer = SimpleNamespace(encode=lambda *_a, **_k: [5])
    group = [FakeSample("p", 3, index) for index in (6, 7)]
    for sample in group if "samples" not in reason else group[1:]:
        vars(sample).update(second)
    with pytest.raises(ValueError, match=reason) if reason else contextlib.nullcontext():
        assert framework.to_prompt(group, tokenizer, 0)["metadata"]["indices"] == [6, 7]
