"""The fields of replies and of the state that docs/api.md lists exist, and all of a round's main ones are listed."""

import re
from pathlib import Path
from typing import Any

from sglang_april.api import messages
from sglang_april.http.reply import delivery_stats
from tests.unit.controller_harness import Build, lengths

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
WHAT: list[tuple[Any, dict[str, Any]]] = [(messages.GetState, {}), (messages.GetPartials, {"run": None})]
OF_THE_HTTP_PROCESS = {"audit", "http"}


def section(title: str) -> str:
    return PAGE.partition(f"# {title}\n")[2].partition("\n#")[0]


def first_column(title: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def state_of(harness: Build) -> tuple[dict[str, Any], dict[str, Any], messages.RoundEnded]:
    """State and partials after a round that has met its quota and carries a partial; the end of that round."""
    server = harness(slots=2)
    server.open("r", lengths(1, 9))
    server.step(4)
    state, partials = (server.command(kind, **of) for kind, of in WHAT)
    return state.data, partials.data, server.replies[0]


def test_statistics_of_a_round(harness: Build) -> None:
    stats = state_of(harness)[2].stats
    listed = first_column("Statistics of a round")
    assert listed - stats.keys() == {"delivered"}
    (row,) = re.findall(r"^\| `delivered` .*$", section("Statistics of a round"), re.MULTILINE)
    delivered = delivery_stats([], 0)
    named = set(re.findall(r"`(\w+)`", row)) - {"delivered", "kept", "min", "mean", "p50", "p90", "p99", "max"}
    assert delivered.keys() - named == {"accepted", "rejected"}
    assert named <= delivered.keys()


def test_state_and_partials(harness: Build) -> None:
    state, partials, _ = state_of(harness)
    assert first_column("State") - state.keys() == OF_THE_HTTP_PROCESS
    shapes = section("State").partition("`GET /april/partials` is ")[2].replace("\n", " ")
    assert set(re.findall(r'"(\w+)"', shapes.partition("}`")[0])) == partials.keys()
    fields = re.findall(r"`(\w+)`", shapes.partition("A partial has ")[2].partition(", each")[0])
    assert fields == list(partials["partials"][0])
    both = re.findall(r"`(\w+)`", shapes.partition("list ")[2])
    assert both == list(partials["groups"][0])
