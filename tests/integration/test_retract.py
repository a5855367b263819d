"""SGLang retracts a random sample every few steps (its own test switch), with suspends and pushes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import NORMAL, Pool
from tests.support.live import LiveServer, live_server
from tests.support.workload import prompt, stoppers

PARAMS: dict[str, dict[str, Any]] = {
    "cool": {"temperature": 0.8},
    "greedy": {"temperature": 0},
    "top_p": {"temperature": 0.8, "top_p": 0.8},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.5},
}
STOPS = [5, 10, 15, 20]


@pytest.fixture
def retracting(pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    server = pool.get("retract", NORMAL, env={"SGLANG_TEST_RETRACT": "1"})
    with live_server(server, lambda seed: models("qwen3", seed)) as live:
        yield live


@pytest.mark.parametrize("pushes", [False, True], ids=["one policy", "a policy per round"])
def test_spans_and_logprobs_are_right_under_retracts(retracting: LiveServer, run: str, pushes: bool) -> None:
    """Every token has the logprob of its version and KV; a retract opens a `recomputed` span."""
    first = [*stoppers(STOPS), *(prompt(name, 40, n=3, **params) for name, params in PARAMS.items())]
    replies = []
    for i in range(len(STOPS) + 1):
        if i and pushes:
            retracting.push(i % 2)
        quota = 1 if i < len(STOPS) else None
        replies.append(retracting.server.rollout(run=run, prompts=[] if i else first, quota=quota, tier="device"))
    groups = [g for reply in replies for g in reply["finished"]]
    assert sorted(g["id"] for g in groups) == sorted(p["id"] for p in first)
    assert sum(r["stats"]["retracted"] for r in replies) > 0
    assert sum(r["stats"]["resumed_kept"] for r in replies) > 0
    retracting.check(groups, {**PARAMS, **{f"stop-{n}": {} for n in STOPS}})
    kinds = {span["kv"] for g in groups for s in g["samples"] for span in s["spans"]}
    assert kinds == ({"fresh", "recomputed", "kept"} if pushes else {"fresh", "recomputed"})
