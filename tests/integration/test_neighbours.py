"""Rounds beside hostile clients of SGLang's own routes (`isolated-samples`, `delivered-once`).

A request that would end SGLang's scheduler by itself is refused with 400 or not sent (tests/support/neighbours.py lists
them). SGLang itself answers some malformed requests with 500, where an exception of a route is no ValueError: for
example a `rid` that is an empty list, a `temperature` that is a string, or fewer `sampling_params` than prompts. The
test lists what was raised, and fails if the plugin raised it. `APRIL_STORIES=25` makes 5,000 calls in each loop;
`APRIL_SEED` draws others.
"""

import itertools
import os
import time
from collections import Counter
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.integration.test_trajectories import open_round
from tests.support.delivery_record import DeliveryRecord
from tests.support.live import LiveServer, until
from tests.support.neighbours import CALLS, Call, Neighbour, heal
from tests.support.tracebacks import raised
from tests.support.workload import prompt

STORIES, ROUNDS, NEIGHBOURS, CALLS_EACH = int(os.environ.get("APRIL_STORIES", "5")), 5, 4, 10
TURNS = 3
PARAMS: dict[str, Any] = {"temperature": 0.8}


def exactly(count: int, strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=count, max_size=count)


calls = st.tuples(st.sampled_from([kind for kind, often in CALLS.items() for _ in range(often)]), st.integers(0, 2**30))
rounds = st.tuples(st.sampled_from([1, 2, None]), exactly(NEIGHBOURS, exactly(CALLS_EACH, calls)))
"""The quota of a round, and the calls of each neighbour beside it."""


class NeighbourStory:
    """The rounds of one run, and neighbours beside them."""

    def __init__(self, live: LiveServer, run: str) -> None:
        self.live, self.run, self.record = live, run, DeliveryRecord()
        self.numbers = itertools.count()
        self.statuses: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.groups: list[dict[str, Any]] = []
        self.attached: list[dict[str, Any]] = []
        """Attached requests that were answered in full, as groups."""
        self.turns: dict[str, dict[str, list[int]]] = {}
        """What each agent was answered, by trajectory and rid."""

    def play(self, quota: int | None, calls: list[list[Call]]) -> None:
        number = next(self.numbers)
        prompts = [prompt(f"p{number}-{i}", 12 + 9 * i, n=2, **PARAMS) for i in range(3)]
        body = {"run": self.run, "round_id": f"{self.run}-{number}", "prompts": prompts, "quota": quota}
        heal(self.live)
        self.record.accept(prompts)
        reply = self.live.in_background(self.roll_out, body)
        asked, acted = self.live.in_background(self.ask, number), self.live.in_background(self.act, number)
        different = [[(kind, f"{number} {i} {j} {s}") for j, (kind, s) in enumerate(m)] for i, m in enumerate(calls)]
        names = [f"{self.run}-neighbour-{number}-{i}" for i in range(len(calls))]
        neighbours = [Neighbour(self.live.server, self.live.model(0), name, runs=(self.run,)) for name in names]
        for done in [self.live.in_background(n.run, made) for n, made in zip(neighbours, different, strict=True)]:
            self.live.result_of(done)
        heal(self.live)
        self.deliver(self.live.result_of(reply))
        self.live.result_of(asked)
        self.live.result_of(acted)
        for neighbour in neighbours:
            self.statuses.update(neighbour.statuses)
            self.faults.update(neighbour.faults)

    def roll_out(self, body: dict[str, Any]) -> dict[str, Any]:
        """A round as a trainer runs it: repeated while the server is closed, for example by a neighbour's push."""
        while (answer := self.live.server.http.post("/april/rollout", json=body)).status_code == 503:
            time.sleep(0.05)
        assert answer.status_code == 200, answer.text[:500]
        return dict(answer.json())

    def ask(self, number: int) -> None:
        """A request that is attached to the run of the rounds."""
        self.generate(f"{self.run} asked {number}", [7, 8, 9, number], number + 1)

    def act(self, number: int) -> None:
        """An agent in the run of the rounds. Each turn extends the one before."""
        name, history, answered = f"agent {number}", [5, 6, 7, number], {}
        for turn in range(TURNS):
            rid = f"{self.run} {name} {turn}"
            drawn = self.generate(rid, history, number + 1, {"x-april-trajectory": name})
            if drawn is not None:
                answered[rid] = drawn
                history = [*history, *drawn, turn]
        if not answered:
            return
        self.turns[name] = answered
        body = {"run": self.run, "trajectories": {name: {"reward": number}}}
        while (answer := self.live.server.http.post("/april/trajectories/done", json=body)).status_code == 503:
            time.sleep(0.05)
        assert answer.status_code == 200, answer.text

    def generate(
        self, rid: str, ids: list[int], seed: int, trajectory: dict[str, str] | None = None
    ) -> list[int] | None:
        """The tokens of an attached request. An abort of everything may end it, and nothing else.

        None: it was aborted before it reached the scheduler, and SGLang has answered 400 or 499.
        """
        length = 40
        params = {**PARAMS, "sampling_seed": seed, "max_new_tokens": length, "ignore_eos": True}
        body = {"rid": rid, "input_ids": ids, "sampling_params": params, "return_logprob": True}
        headers = {"x-april-run": self.run, **(trajectory or {})}
        answer = self.live.server.http.post("/generate", json=body, headers=headers)
        if answer.status_code in (400, 499) and f"Request {rid} was aborted" in answer.text:
            return None
        assert answer.status_code == 200, answer.text[:500]
        meta, drawn = answer.json()["meta_info"], list(answer.json()["output_ids"])
        if meta["finish_reason"]["type"] != "abort":
            assert meta["finish_reason"] == {"type": "length", "length": length}
            logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
            spans = meta["april"]["spans"]
            if trajectory:  # it may continue on KV of an older version, whose weights were the same
                spans = [{"start": 0, "end": length, "version": spans[-1]["version"], "kv": "fresh"}]
            sample = {"index": 0, "output_ids": drawn, "logprobs": logprobs, "spans": spans, "seed": seed}
            self.attached.append({"id": rid, "prompt_ids": ids, "samples": [sample]})
        return drawn

    def deliver(self, reply: dict[str, Any]) -> None:
        self.record.deliver(reply)
        self.groups += reply["finished"]

    def end(self) -> None:
        """Everything is delivered with exact tokens, and nothing is held."""
        heal(self.live)
        state = self.live.server.state()
        for name in state["http"]["rounds"]:  # a round of trajectories ends by itself only with its quota
            self.live.server.post(f"/april/rounds/{name}/stop")
        for run in {*state["runs"], *state["trajectories"]} - {self.run}:
            self.live.server.post("/april/drop", {"run": run})
        self.deliver(self.live.server.rollout(run=self.run, prompts=[], quota=None))
        self.record.close()
        self.collect()
        self.live.policies |= dict.fromkeys(range(self.live.version + 1), self.live.model(0))
        drawn = [*self.groups, *self.attached]
        self.live.check(drawn, {group["id"]: PARAMS for group in drawn})
        until(lambda: not self.live.server.state()["attached"], "no attached request of a client that has gone is left")
        state = self.live.server.state()
        assert (state["closed"], sum(state["samples"].values())) == ("", 0)
        if state["trajectories"].get(self.run, {}).get("undelivered"):  # a neighbour has begun one, which keeps its KV
            self.live.server.post("/april/drop", {"run": self.run})
            state = self.live.server.state()
        assert state["pool"]["held"] == 0

    def collect(self) -> None:
        """Every trajectory is delivered once, with each turn as its agent got it."""
        name = f"{self.run}-trajectories"
        reply = open_round(self.live, self.run, quota=None, round_id=name)
        self.live.server.post(f"/april/rounds/{name}/stop")
        delivered = [one for one in self.live.result_of(reply)["trajectories"] if one["id"] in self.turns]
        assert sorted(one["id"] for one in delivered) == sorted(self.turns)
        for one in delivered:
            assert {leg["rid"]: leg["output_ids"] for leg in one["legs"]} == self.turns[one["id"]]
            assert one["reward"] == int(one["id"].split()[1])


def test_rounds_beside_hostile_neighbours_are_exact(live: LiveServer, run: str) -> None:
    """At least 1,000 calls in each loop; hypothesis draws their order, kinds and arguments."""
    statuses: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    numbers = itertools.count()
    logged = live.server.log.stat().st_size

    @hypothesis.seed(int(os.environ.get("APRIL_SEED", "0")))
    @settings(
        max_examples=STORIES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(exactly(ROUNDS, rounds))
    def stories(drawn: list[tuple[int | None, list[list[Call]]]]) -> None:
        story = NeighbourStory(live, f"{run}-{next(numbers)}")
        for quota, calls in drawn:
            story.play(quota, calls)
        story.end()
        statuses.update(story.statuses)
        faults.update(story.faults)
        statuses["attached, with exact tokens"] += len(story.attached)
        statuses["trajectories, delivered once"] += len(story.turns)
        print(f"{sum(statuses[kind] for kind in CALLS)} calls", flush=True)

    stories()
    exceptions = raised(live.server.log.read_bytes()[logged:].decode(errors="replace"))
    print(dict(statuses), dict(faults), dict(exceptions))
    assert sum(statuses[kind] for kind in CALLS) >= STORIES * ROUNDS * NEIGHBOURS * CALLS_EACH
    assert statuses["attached, with exact tokens"] > 0
    assert statuses["trajectories, delivered once"] > 0
    assert not [path for path in faults if path.startswith("/april")]
    assert not [one for one in exceptions if one.package == "sglang_april"]
