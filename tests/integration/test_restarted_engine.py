"""An engine that was killed is at version 0 after its restart: the next push to all engines heals it."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from sglang_april.client import AprilError
from sglang_april.client.client import AprilClient
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.support.live import LiveServer
from tests.support.workload import prompt

pytestmark = pytest.mark.ends_server

Push = Callable[[EnginePool, Sequence[LiveServer], int], None]
"""Gives all engines the weights of a seed, as one new version."""


def push_of_the_pool(pool: EnginePool, engines: Sequence[LiveServer], seed: int) -> None:
    with pool.push():
        for live in engines:
            assert live.load(seed)["success"]


def named_weight_calls(_pool: EnginePool, engines: Sequence[LiveServer], seed: int) -> None:
    """As slime pushes: SGLang's calls alone, each with the number of the trainer's push."""
    version = 1 + max(live.version for live in engines)
    for live in engines:
        live.server.loaded = live.model(seed)
        body = {"model_path": str(live.model(seed)), "weight_version": str(version)}
        assert live.server.post("/update_weights_from_disk", body)["success"]


@pytest.mark.parametrize("push", [push_of_the_pool, named_weight_calls])
def test_a_push_heals_a_restarted_engine(normal: LiveServer, second: LiveServer, run: str, push: Push) -> None:
    """Until then the pool refuses rounds. The round after it uses both engines, each with the new weights."""
    engines = [normal, second]
    pool = EnginePool([AprilClient(live.server.url, retry_s=60) for live in engines])
    push_of_the_pool(pool, engines, 1)
    for live in engines:
        live.policies[live.version] = live.model(1)
    prompts = {f"{at}-{i}": {**prompt(f"{at}-{i}", 20 + 300 * i), "engine": at} for at in range(2) for i in range(3)}
    first = play(pool, run, prompts, quota=2)
    carried = {name: prompts[name]["engine"] for name in prompts if name not in delivered(first)}
    assert held(pool, run) == set(carried)
    assert set(carried.values()) == {0, 1}

    second.server.stop()
    second.server.spawn()
    second.server.wait()
    before = normal.version
    assert second.version == 0 < before
    assert held(pool, run) == {name for name in carried if carried[name] == 0}
    lost = {name: prompts[name] for name in carried if carried[name] == 1}
    with pytest.raises(AprilError, match=rf"versions \[0, {before}\]; push to all of them"):
        play(pool, run, lost, quota=None)

    push(pool, engines, 2)
    assert [live.version for live in engines] == [before + 1] * 2
    rest = play(pool, run, lost, quota=None)
    assert (rest.end_reason, rest.policy_version, delivered(rest)) == ("exhausted", before + 1, set(carried))
    for at, live in enumerate(engines):
        live.policies[before + 1] = live.model(2)
        groups = [as_reply(group) for group in rest.groups if carried[group.id] == at]
        assert {group["samples"][0]["spans"][-1]["version"] for group in groups} == {before + 1}
        live.check(groups, {name: prompts[name]["sampling_params"] for name in prompts})


def play(pool: EnginePool, run: str, prompts: dict[str, dict[str, Any]], quota: int | None) -> RolloutSummary:
    *_, summary = pool.stream(run=run, prompts=list(prompts.values()), quota=quota, count="finished")
    assert isinstance(summary, RolloutSummary)
    return summary


def delivered(summary: RolloutSummary) -> set[str]:
    return {named["id"] for named in summary.delivered}


def held(pool: EnginePool, run: str) -> set[str]:
    """Ids of the undelivered groups at the engines."""
    return {row["id"] for row in pool.partials(run)["groups"]}


def as_reply(group: RolloutGroup) -> dict[str, Any]:
    """A group as the HTTP reply has it."""
    samples = [
        {
            "index": sample.index,
            "output_ids": sample.output_ids.tolist(),
            "logprobs": sample.logprobs.tolist(),
            "seed": sample.seed,
            "spans": [msgspec.structs.asdict(span) for span in sample.spans],
        }
        for sample in group.samples
    ]
    return {"id": group.id, "prompt_ids": group.prompt_ids.tolist(), "samples": samples}
