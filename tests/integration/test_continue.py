"""`after_quota: continue` on the live server: no gap between rounds, pushes, pauses and limits."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.live import until
from tests.support.server import Server
from tests.support.workload import Forwards, prompt

LONG = 1800
"""Output length of a sample that runs through a whole test."""


@pytest.fixture(params=["normal", "overlap"])
def each_loop(request: pytest.FixtureRequest, run: str) -> Iterator[Server]:
    """A server with each scheduler loop; the run is dropped afterwards."""
    server: Server = request.getfixturevalue({"normal": "server", "overlap": "overlap"}[request.param])
    yield server
    server.post("/continue_generation", {"torch_empty_cache": False})
    for name in server.state()["http"]["rounds"]:
        server.post(f"/april/rounds/{name}/stop")
    server.post("/april/drop", {"run": run})


def more_decodes(server: Server) -> None:
    """Wait for some more decode steps."""
    count = Forwards(server)
    until(lambda: len(count.rows(decode=True)) > 3)


def ahead(server: Server, run: str, **body: Any) -> dict[str, Any]:
    """Run a round of one short group; a long sample continues after it."""
    prompts = [prompt(f"{run}-short", 3), prompt(f"{run}-long", LONG)]
    body = {"quota": 1, "after_quota": "continue", "ahead": 5, **body}
    reply = server.rollout(run=run, prompts=prompts, **body)
    assert [g["id"] for g in reply["finished"]] == [f"{run}-short"]
    assert (reply["carried"]["running"], reply["carried"]["samples"]) == (1, 1)
    return reply


def test_no_gap_between_rounds(each_loop: Server, run: str) -> None:
    """Generation continues after the reply; groups that finish meanwhile come first in the next reply."""
    prompts = [prompt("a", 3), prompt("b", 12), prompt("long", LONG)]
    body: dict[str, Any] = {"run": run, "after_quota": "continue", "ahead": 5}
    first = each_loop.rollout(prompts=prompts, quota=1, **body)
    assert [g["id"] for g in first["finished"]] == ["a"]
    until(lambda: each_loop.state()["samples"]["finished"] == 1)
    more_decodes(each_loop)
    second = each_loop.rollout(prompts=[prompt("c", 5)], quota=2, **body)
    assert [g["id"] for g in second["finished"]] == ["b", "c"]
    stats = second["stats"]
    assert stats["ahead"]["tokens_generated"] >= 9
    assert (stats["resumed_kept"], stats["resumed_recomputed"], stats["started"]) == (0, 0, 1)
    assert stats["carried_in"]["tokens"] + 12 == first["carried"]["tokens"] + stats["ahead"]["tokens_generated"]
    third = each_loop.rollout(run=run, prompts=[prompt("d", 3)], quota=1)
    assert [g["id"] for g in third["finished"]] == ["d"]
    assert each_loop.state()["samples"]["running"] == 0
    (partial,) = each_loop.partials(run)
    assert [span[2:] for span in partial["spans"]] == [[first["policy_version"], "fresh"]]


def test_push_suspends_and_resumes_samples_that_run_ahead(each_loop: Server, run: str) -> None:
    """Samples that run ahead resume under the new version on kept KV."""
    version = ahead(each_loop, run)["policy_version"]
    more_decodes(each_loop)
    assert each_loop.push(each_loop.model) == version + 1
    more_decodes(each_loop)
    reply = each_loop.rollout(run=run, prompts=[prompt(f"{run}-stop", 2)], quota=1)
    assert reply["policy_version"] == version + 1
    (partial,) = each_loop.partials(run)
    assert [tuple(span[2:]) for span in partial["spans"]] == [(version, "fresh"), (version + 1, "kept")]


def test_pause_freezes_samples_that_run_ahead(each_loop: Server, run: str) -> None:
    """No sample runs until `continue_generation`."""
    ahead(each_loop, run)
    each_loop.post("/pause_generation", {"mode": "in_place"})
    state = each_loop.state()
    assert (state["frozen"], state["samples"]["running"], state["samples"]["suspended"]) == (True, 0, 1)
    count = Forwards(each_loop)
    assert each_loop.state()["samples"]["running"] == 0
    assert count.rows(decode=True) == []
    each_loop.post("/continue_generation", {"torch_empty_cache": False})
    more_decodes(each_loop)


def test_load_and_aborts_as_another_job_sees_them(each_loop: Server, run: str) -> None:
    """slime ends a rollout by aborting everything until the load is zero (docs/integrations/slime.md). Groups that a
    run has left are no load; a run that generates ahead is load, also after an abort, until its groups are dropped."""

    def load() -> int:
        (row,) = each_loop.http.get("/v1/loads", params={"include": "core"}).json()["loads"]
        return int(row["num_running_reqs"] + row["num_waiting_reqs"])

    prompts = [prompt(f"{run}-short", 3), prompt(f"{run}-long", LONG)]
    each_loop.rollout(run=run, prompts=prompts, quota=1)
    until(lambda: load() == 0)
    ahead(each_loop, f"{run}-ahead")
    until(lambda: load() == 1)
    each_loop.post("/abort_request", {"abort_all": True})
    more_decodes(each_loop)
    assert load() == 1
    each_loop.post("/april/drop", {"run": f"{run}-ahead"})
    until(lambda: load() == 0)


def test_running_ahead_stops_when_enough_groups_wait(each_loop: Server, run: str) -> None:
    """At most `ahead` quotas of groups finish ahead; the next reply delivers them without a forward."""
    prompts = [prompt("a", 3), *(prompt(f"p{i}", 8) for i in range(4)), prompt("long", LONG)]
    each_loop.rollout(run=run, prompts=prompts, quota=1, after_quota="continue", ahead=3)
    until(lambda: each_loop.state()["ahead"] == [{"run": run, "waiting": 4, "rests": True}])
    assert each_loop.state()["samples"]["running"] == 0
    count = Forwards(each_loop)
    reply = each_loop.rollout(run=run, prompts=[], quota=3)
    assert [g["id"] for g in reply["finished"]] == ["p0", "p1", "p2"]
    assert count.rows(decode=True) == count.rows(decode=False) == []


def test_running_ahead_stops_at_the_staleness_bound(each_loop: Server, run: str) -> None:
    """The next round finishes the group first."""
    prompts = [prompt("a", 3), prompt("tail", 400), prompt("long", LONG)]
    each_loop.rollout(run=run, prompts=prompts, quota=1, after_quota="continue", ahead=9, max_staleness=1)
    until(lambda: each_loop.state()["samples"]["running"])
    each_loop.push(each_loop.model)
    state = each_loop.state()
    assert ([a["rests"] for a in state["ahead"]], state["samples"]["running"]) == ([True], 0)
    each_loop.post("/april/drop", {"run": run, "ids": ["long"]})
    reply = each_loop.rollout(run=run, prompts=[prompt("new", 3)], quota=1, max_staleness=1)
    assert [g["id"] for g in reply["finished"]] == ["tail"]
