"""Rounds beside hostile clients of SGLang's own routes (`isolated-samples`, `delivered-once`).

A request that would end SGLang's scheduler by itself is refused with 400, or not sent (tests/support/neighbours.py says
which, and why). `APRIL_STORIES=1250` makes 50,000 calls, which takes more than an hour.
"""

import itertools
import os
import time
from collections import Counter
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.delivery_record import DeliveryRecord
from tests.support.live import LiveServer, until
from tests.support.neighbours import CALLS, Neighbour, heal
from tests.support.workload import prompt

STORIES, NEIGHBOURS, CALLS_EACH = int(os.environ.get("APRIL_STORIES", "50")), 4, 10
PARAMS: dict[str, Any] = {"temperature": 0.8}


class NeighbourStory:
    """One round of a run, and neighbours beside it."""

    def __init__(self, live: LiveServer, run: str) -> None:
        self.live, self.run, self.record = live, run, DeliveryRecord()
        self.numbers = itertools.count()
        self.statuses: Counter[str] = Counter()
        self.groups: list[dict[str, Any]] = []

    def play(self, seeds: list[int], quota: int | None) -> None:
        number = next(self.numbers)
        prompts = [prompt(f"p{number}-{i}", 12 + 9 * i, n=2, **PARAMS) for i in range(3)]
        body = {"run": self.run, "round_id": f"{self.run}-{number}", "prompts": prompts, "quota": quota}
        heal(self.live)
        self.record.accept(prompts)
        reply = self.live.in_background(self.roll_out, body)
        neighbours = [Neighbour(self.live.server, self.live.model(0), seed) for seed in seeds]
        for done in [self.live.in_background(neighbour.run, CALLS_EACH) for neighbour in neighbours]:
            self.live.result_of(done)
        heal(self.live)
        self.deliver(self.live.result_of(reply))
        for neighbour in neighbours:
            self.statuses.update(neighbour.statuses)

    def roll_out(self, body: dict[str, Any]) -> dict[str, Any]:
        """A round as a trainer runs it: repeated while the server is closed, for example by a neighbour's push."""
        while (answer := self.live.server.http.post("/april/rollout", json=body)).status_code == 503:
            time.sleep(0.05)
        assert answer.status_code == 200, answer.text[:500]
        return dict(answer.json())

    def deliver(self, reply: dict[str, Any]) -> None:
        self.record.deliver(reply)
        self.groups += reply["finished"]

    def end(self) -> None:
        """Everything is delivered with exact tokens, and nothing is held."""
        heal(self.live)
        for run in self.live.server.state()["runs"]:
            if run != self.run:
                self.live.server.post("/april/drop", {"run": run})
        self.deliver(self.live.server.rollout(run=self.run, prompts=[], quota=None))
        self.record.close()
        self.live.policies |= dict.fromkeys(range(self.live.version + 1), self.live.model(0))
        self.live.check(self.groups, {group["id"]: PARAMS for group in self.groups})
        until(lambda: not self.live.server.state()["attached"], "no attached request of a client that has gone is left")
        state = self.live.server.state()
        assert (state["closed"], sum(state["samples"].values()), state["pool"]["held"]) == ("", 0, 0)


def test_rounds_beside_hostile_neighbours_are_exact(normal: LiveServer, run: str) -> None:
    """At least 2,000 calls from fixed seeds, unless requested otherwise."""
    statuses: Counter[str] = Counter()
    names = itertools.count()

    @settings(max_examples=STORIES // 5, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(
        plan=st.lists(
            st.tuples(
                st.lists(st.integers(0, 2**30), min_size=NEIGHBOURS, max_size=NEIGHBOURS), st.sampled_from([1, 2, None])
            ),
            min_size=5,
            max_size=5,
        )
    )
    def stories(plan: list[tuple[list[int], int | None]]) -> None:
        story = NeighbourStory(normal, f"{run}-{next(names)}")
        for seeds, quota in plan:
            story.play(seeds, quota)
        story.end()
        statuses.update(story.statuses)

    stories()
    print(dict(statuses))
    assert sum(statuses[kind] for kind in CALLS) >= STORIES * NEIGHBOURS * CALLS_EACH
