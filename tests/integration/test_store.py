"""The page store on the live server, in tokens."""

from typing import Any

from tests.support.live import LiveServer, until
from tests.support.workload import prompt

PAGE = 16
"""Tokens of a page of the store."""
MEMBERS, LENGTH = 4, 100
PARAMS: dict[str, dict[str, Any]] = {"group": {"temperature": 0.8}, "short": {"temperature": 0.8}}


def pages(tokens: int) -> int:
    """Tokens, in whole pages."""
    return -(-tokens // PAGE) * PAGE


def stored(live: LiveServer) -> int:
    """Tokens of the host tier that are taken."""
    return int(live.server.state()["store"]["used_tokens"]["host"])


def test_group_prompt_is_stored_once_on_the_host(live: LiveServer, run: str) -> None:
    """The whole pages of the prompt are stored once, each member's own pages behind them, also across a push."""
    server, before = live.server, stored(live)
    requested = [prompt("group", 60, ids=LENGTH, n=MEMBERS, **PARAMS["group"]), prompt("short", 20, **PARAMS["short"])]
    groups = server.rollout(run=run, prompts=requested, quota=1, tier="host")["finished"]
    until(lambda: not server.state()["store"]["in_flight"], "all copies are made")
    partials = server.partials(run)
    assert [p["tier"] for p in partials] == ["host"] * MEMBERS
    whole = [LENGTH + p["tokens"] - 1 for p in partials]
    shared = LENGTH // PAGE * PAGE
    assert shared == 96
    once = shared + sum(pages(tokens - shared) for tokens in whole)
    assert stored(live) - before == once
    assert sum(map(pages, whole)) - once == (MEMBERS - 1) * shared, "what it costs to store it for each"
    assert server.http.get("/april/check").json() == {"ok": True, "problem": ""}
    version = live.push(1)
    reply = server.rollout(run=run, prompts=[], quota=None, kv="keep")
    assert (reply["stats"]["resumed_kept"], reply["stats"]["reprefilled_tokens"]) == (MEMBERS, 0)
    spans = [s["spans"][-1] for g in reply["finished"] for s in g["samples"]]
    assert [(span["version"], span["kv"]) for span in spans] == [(version, "kept")] * MEMBERS
    live.check(groups + reply["finished"], PARAMS)
    assert stored(live) == before
