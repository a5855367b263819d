"""docs/design.md against the code: transitions of a sample and of its KV, and the messages between processes."""

import re
import typing
from pathlib import Path

import pytest

from sglang_april.api import messages
from sglang_april.kv import kv_pages
from sglang_april.scheduler import state

PAGE = (Path(__file__).parents[2] / "docs/design.md").read_text()
OUTSIDE = {"–", "(running)", "(no pages)", "delivered", "deleted", "any"}
"""Ends of transitions at which there is no state: before acceptance, while the sample runs, after it has left."""
SAMPLES = "## The life of a sample", "### KV of a suspended sample"
KV = "### KV of a suspended sample", "### Claims between steps"


def rows(section: tuple[str, str]) -> list[list[str]]:
    """The cells of all table rows between two headings."""
    text = PAGE.partition(section[0])[2].partition(section[1])[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]


def transitions(section: tuple[str, str]) -> set[tuple[str, str]]:
    """Pairs of states in the tables whose first columns are `from` and `to`."""
    listed = rows(section)
    (start,) = (number for number, row in enumerate(listed) if row[:2] == ["from", "to"])
    found = set()
    for before, after, *_ in listed[start + 2 :]:
        for first in re.split(r",\s*", before.replace("`", "")):
            found |= {(first, second) for second in re.split(r",\s*", after.replace("`", ""))}
    return {pair for pair in found if not OUTSIDE & set(pair)}


def test_transitions_of_a_sample() -> None:
    allowed = {(a.value, b.value) for a, after in state._ALLOWED.items() for b in after}
    assert transitions(SAMPLES) - {("running", "running")} == allowed


def test_transitions_of_kv() -> None:
    assert transitions(KV) == {(a.name, b.name) for a, after in kv_pages._ALLOWED.items() for b in after}
    named = {row[0].strip("`") for row in rows(KV)}
    assert {kv_state.name for kv_state in kv_pages.KvState} <= named, "each state is described"


@pytest.mark.parametrize("kind", [messages.Command, messages.Event, messages.Observation])
def test_every_message_is_described(kind: typing.Any) -> None:
    listed = {
        name for row in rows(("## Messages", "## What is decided where")) for name in re.findall(r"`(\w+)`", row[0])
    }
    assert {message.__name__ for message in typing.get_args(kind)} - listed == set()
