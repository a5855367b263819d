"""A round ends in the step that meets its quota (`stop-in-step`); a wrapper on the model counts forwards."""

from typing import Any

import pytest

from sglang_april.adapter import versions
from tests.integration.conftest import NORMAL, Pool
from tests.support.compare import assert_near, by_key, stock_noise
from tests.support.server import Server
from tests.support.workload import Forwards, in_one_round, in_rounds, prompt, stoppers

GREEDY = {"temperature": 0}
CHUNK = 64
"""Prompt tokens of one prefill step on the test servers."""


@pytest.fixture(params=["server", "overlap"])
def each_loop(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


def test_no_decode_step_after_the_quota(each_loop: Server, run: str) -> None:
    """No decode step after the end; in the overlap loop the step in flight is kept and counted."""
    flight = int(each_loop.state()["overlap"])
    count = Forwards(each_loop)
    prompts = [prompt("a", 5), prompt("b", 9), *(prompt(f"long-{i}", 40) for i in range(6))]
    reply = each_loop.rollout(run=run, prompts=prompts, quota=2)
    assert each_loop.state()["samples"]["running"] == 0
    assert count.rows(decode=False) == [8]
    # The prefill draws the first token. In the overlap loop a row that has just finished is still in the next step; on
    # 0.5.23 not if its length ends it.
    rows = [8] * 4 + [7] * 4
    in_flight = [*rows, 6] if versions.installed()["sglang"] == "0.5.23" else [8, *rows]
    assert count.rows(decode=True) == (in_flight if flight else rows)
    assert [p["tokens"] for p in each_loop.partials(run)] == [9 + flight] * 6
    assert reply["stats"]["tokens_after_quota"] == 6 * flight
    assert reply["stats"]["tokens_generated"] == 5 + 9 + 6 * (9 + flight)
    assert reply["carried"]["tokens"] == 6 * (9 + flight)
    finished = by_key(each_loop.drain(run))
    assert [s["spans"] for s in finished.values()] == [[span(0, 40, reply["policy_version"])]] * 6


def test_stop_during_a_chunked_prefill(each_loop: Server, run: str) -> None:
    """A prefill meets the quota; a half-prefilled sample counts as unstarted and stays untouched."""
    prompts = [prompt("short", 1), prompt("long", 12, ids=5 * CHUNK), prompt("after", 12)]
    wanted = in_one_round(each_loop, f"{run}-unbroken", prompts, sampling_params=GREEDY)
    each_loop.post("/flush_cache")
    count = Forwards(each_loop)
    reply = each_loop.rollout(run=run, prompts=prompts, quota=1, sampling_params=GREEDY)
    assert [g["id"] for g in reply["finished"]] == ["short"]
    assert len(count.rows(decode=False)) == 1 + int(each_loop.state()["overlap"])
    assert reply["carried"]["groups"] == 2
    assert reply["carried"]["tokens"] == 0
    assert each_loop.partials(run) == []
    version = each_loop.push(each_loop.model, flush=False)
    rest = each_loop.drain(run)
    assert all(s["spans"] == [span(0, 12, version)] for g in rest for s in g["samples"])
    assert_near(by_key([*reply["finished"], *rest]), wanted, stock_noise(each_loop))


def test_stop_during_a_chunked_recompute(each_loop: Server, run: str) -> None:
    """A sample stopped while its old tokens are prefilled again keeps them, and continues later."""
    prompts = [prompt("stop", 3), prompt("ends", 4), prompt("long", 9, ids=5 * CHUNK)]
    wanted = in_one_round(each_loop, f"{run}-unbroken", prompts, sampling_params=GREEDY)
    each_loop.post("/flush_cache")
    body: dict[str, Any] = {"run": run, "tier": "none", "quota": 1, "sampling_params": GREEDY}
    # "long" is prefilled alone for five steps, so the others begin to decode when it does.
    groups = each_loop.rollout(prompts=prompts, **body)["finished"]
    before = {p["id"]: p["tokens"] for p in each_loop.partials(run)}
    each_loop.post("/flush_cache")
    reply = each_loop.rollout(prompts=[], **body)
    groups += reply["finished"]
    assert [g["id"] for g in groups] == ["stop", "ends"]
    assert {p["id"]: (p["tokens"], p["tier"]) for p in each_loop.partials(run)} == {"long": (before["long"], "none")}
    groups += each_loop.drain(run)
    assert_near(by_key(groups), wanted, stock_noise(each_loop))


def test_stop_with_samples_waiting_for_prefill(each_loop: Server, run: str) -> None:
    """Admitted samples in SGLang's queue return untouched, in order."""
    prompts = [prompt("short", 1, ids=10), *(prompt(f"p{i:02}", 3, ids=10) for i in range(20))]
    count = Forwards(each_loop)
    reply = each_loop.rollout(run=run, prompts=prompts, quota=1)
    steps = len(count.rows(decode=False))
    assert steps == 1 + int(each_loop.state()["overlap"])
    assert reply["stats"]["started"] == 21
    started = [p["id"] for p in each_loop.partials(run)]
    assert started == [f"p{i:02}" for i in range(len(started))]
    assert len(started) <= 6.4 * steps
    count = Forwards(each_loop)
    assert len(by_key(each_loop.drain(run))) == 20
    assert sum(count.rows(decode=False)) >= 20 - len(started)


def test_stop_during_grammar_compilation(each_loop: Server, run: str) -> None:
    """A sample in SGLang's grammar queue returns untouched; its grammar is compiled again."""
    words = [f"{run}x{i}" for i in range(10)]
    prompts = [prompt("short", 1), prompt("word", 60, regex="|".join(words))]
    count = Forwards(each_loop)
    with each_loop.grammars_held():
        reply = each_loop.rollout(run=run, prompts=prompts, quota=1)
    assert count.rows(decode=False) == [1]
    assert reply["stats"]["started"] == 2
    assert reply["carried"]["groups"] == 1
    assert reply["carried"]["tokens"] == 0
    (word,) = by_key(each_loop.drain(run)).values()
    assert word["text"] in words


def test_stop_with_retracted_samples(pool: Pool, run: str) -> None:
    """A sample that SGLang has just retracted keeps its tokens when the round ends."""
    server = pool.get("retract", NORMAL, env={"SGLANG_TEST_RETRACT": "1"})
    prompts = [*stoppers(range(4, 16)), *(prompt(f"p{i}", 20 + i, temperature=1.0) for i in range(8))]
    wanted = in_one_round(server, f"{run}-unbroken", prompts)
    samples, replies = in_rounds(server, run, prompts, 12, tier="device")
    assert sum(r["stats"]["retracted"] for r in replies) > 0
    assert any(r["carried"]["tokens_by_tier"]["none"] for r in replies), "no stop came upon a retracted sample"
    assert any(r["carried"]["tokens_by_tier"]["device"] for r in replies)
    assert all(r["stats"]["tokens_after_quota"] == 0 for r in replies)
    assert_near(samples, wanted, stock_noise(server), seeded=True)
    for sample in samples.values():
        assert [s["kv"] for s in sample["spans"]] in (["fresh"], ["fresh", "recomputed"])


@pytest.mark.parametrize("surplus", ["carry", "return"])
def test_samples_that_finish_in_the_same_step(each_loop: Server, run: str, surplus: str) -> None:
    """The surplus is returned, or comes first in the next reply, which may need no forward."""
    prompts = [prompt(f"p{i}", 6) for i in range(4)] + [prompt("long", 20)]
    reply = each_loop.rollout(run=run, prompts=prompts, quota=1, surplus=surplus)
    assert reply["end_reason"] == "quota"
    if surplus == "return":
        assert [g["id"] for g in reply["finished"]] == ["p0", "p1", "p2", "p3"]
        assert reply["carried"]["finished_groups"] == 0
    else:
        assert [g["id"] for g in reply["finished"]] == ["p0"]
        assert reply["carried"]["finished_groups"] == 3
        count = Forwards(each_loop)
        second = each_loop.rollout(run=run, prompts=[prompt("new", 4)], quota=2)
        assert [g["id"] for g in second["finished"]] == ["p1", "p2"]
        assert count.rows(decode=True) == count.rows(decode=False) == []
        assert second["end_reason"] == "quota"
        assert second["stats"]["started"] == 0
        third = each_loop.rollout(run=run, prompts=[], quota=2)
        assert [g["id"] for g in third["finished"]] == ["p3", "new"]
    assert [g["id"] for g in each_loop.drain(run)] == ["long"]


def span(start: int, end: int, version: int, kv: str = "fresh") -> dict[str, Any]:
    return {"start": start, "end": end, "version": version, "kv": kv}
