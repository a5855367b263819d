"""A rollout of slime's kind whose engine delivers a group that it has not streamed; tests/integration/test_slime.py
has the other cases, with the trainer's own functions and a live server."""

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.types import RolloutGroup, RolloutSummary
from sglang_april.integrations.framework import Framework
from sglang_april.integrations.group_rollout import Rollouts, _Rollout
from tests.bridge.fake_engine_pool import FakePoolEngine, group
from tests.support.live import until


class FakeFramework:
    """A trainer whose groups have one sample."""

    package = "trainer"
    dropped: frozenset[int] = frozenset()
    filters = SimpleNamespace(
        MetricGatherer=lambda: SimpleNamespace(collect=dict, on_dynamic_filter_drop=lambda reason: None)
    )

    def sampling_params(self, _args: Namespace) -> dict[str, Any]:
        return {}

    def to_group(self, _args: Namespace, finished: RolloutGroup, *_: Any) -> list[Any]:
        return [SimpleNamespace(index=int(finished.id), response_length=2, reward=None)]

    async def reward(self, _args: Namespace, samples: list[Any]) -> list[Any]:
        for sample in samples:
            sample.reward = 1.0
        return samples

    def drop_reason(self, _args: Namespace, samples: list[Any], _remaining: int) -> str | None:
        return "dropped" if samples[0].index in self.dropped else None

    def prompt_id(self, group: list[Any]) -> str:
        return str(group[0].index)

    def to_prompt(self, group: list[Any], *_: Any) -> dict[str, Any]:
        return {"id": self.prompt_id(group), "n": 2}

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


def test_group_accepted_before_a_restart_is_delivered_with_its_reward() -> None:
    """The engine keeps the verdict of a rollout that was cut off, and shows no preview of the group again."""
    args = Namespace(over_sampling_batch_size=1, rollout_batch_size=1, partial_rollout=True)
    made: Any = (FakeFramework(), FakeEnginePool(), None, args, 0, lambda _groups: [], [], [])
    output = asyncio.run(_Rollout(*made).run(set()))
    assert [[sample.index for sample in samples] for samples in output.samples] == [[7]]
    assert output.samples[0][0].reward == 1.0


class DataSource:
    """Groups of one sample, numbered from 0."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self, count: int) -> list[Any]:
        self.drawn += count
        return [[SimpleNamespace(index=self.drawn - count + i)] for i in range(count)]


def indices(output: Any) -> list[int]:
    return [samples[0].index for samples in output.samples]


def test_dropped_groups_are_replaced_at_engines_that_still_have_the_round_open() -> None:
    """One engine has a verdict on all of its groups while the other has finished none."""
    engines = [FakePoolEngine(), FakePoolEngine()]
    framework, source, unsent = FakeFramework(), DataSource(), []
    framework.dropped = frozenset({0, 2})
    args = Namespace(over_sampling_batch_size=4, rollout_batch_size=4, partial_rollout=True)
    engines[0].may_finish = 0
    made: Any = (framework, EnginePool(engines), None, args, 0, source, unsent, [])
    with ThreadPoolExecutor() as threads:
        output = threads.submit(asyncio.run, _Rollout(*made).run(set()))
        until(lambda: any(one.ended for one in engines[1].rounds.values()), "the second engine has ended the round")
        with engines[0].changed:
            engines[0].may_finish = 100
            engines[0].changed.notify_all()
        assert indices(output.result(60)) == [1, 3, *indices(output.result())[2:]]
    assert all(index > 3 for index in indices(output.result())[2:])
    assert not unsent


def test_groups_that_had_to_be_finished_beyond_the_batch_are_trained_on_in_the_next_one() -> None:
    """At the server's staleness bound, a round accepts them all."""
    engine, surplus = FakePoolEngine(), []
    args = Namespace(over_sampling_batch_size=3, rollout_batch_size=2, partial_rollout=True)
    made: Any = (FakeFramework(), EnginePool([engine]), None, args, 0, DataSource(), [], surplus)  # type: ignore[list-item]
    engine.mandatory = {"0", "1", "2"}
    assert indices(asyncio.run(_Rollout(*made).run(set()))) == [0, 1]
    assert [samples[0].index for samples in surplus] == [2]
    engine.mandatory = set()
    assert indices(asyncio.run(_Rollout(*made).run(set()))) == [2, 3]
    assert not surplus


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
