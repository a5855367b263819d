"""Drawn stories of agents: turns, tool delays, edited histories, pauses, pushes, quotas, aborts, disconnects, rejects
(`trajectory-quota`, `parked-kv`).

Every trajectory that is not rejected is delivered once, with every leg that its agent got an answer for, as the agent
got it; tokens and logprobs are those of a replay, on the KV that the spans name.
`APRIL_STORIES=100` plays 200 stories, 100 on each loop; `APRIL_SEED` draws others.
"""

import itertools
import json
import os
import threading
import time
from typing import Any

import httpx
import hypothesis
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.integration.test_trajectories import open_round
from tests.support.live import LiveServer, until
from tests.support.oracle import (
    LOGPROB_LIMIT,
    Oracle,
    ReplayResult,
    drift_of,
    logprobs_of,
    mismatched_tokens,
    processed,
)
from tests.support.story_operations import SHARED_OPERATIONS, StoryOperations

SEED, STORIES = int(os.environ.get("APRIL_SEED", "0")), int(os.environ.get("APRIL_STORIES", "5"))
PARAMS = {"temperature": 0.8}
LIMIT_S = 300.0
PHASES = [Phase.explicit, Phase.generate]

operations = st.one_of(
    *SHARED_OPERATIONS,
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("disconnect"), st.integers(0, 9)),
    st.tuples(st.just("reject"), st.integers(0, 9)),
)
turns = st.tuples(
    st.integers(4, 30),  # tokens that the model draws
    st.sampled_from([0, 1, 3, 20, 130]),  # tokens of the tool; 130: a prefill in chunks
    st.sampled_from([0.0, 0.02, 0.2]),  # seconds that the tool takes
    st.sampled_from([0, 0, 0, 2, 9]),  # tokens at the end of the history that are edited
    st.booleans(),  # the answer streams
)
LONG_TURN = (30, 3, 0.0, 0, False)
PUSHES = [("push", 1), ("wait", 4), ("push", 0), ("wait", 4), ("push", 1)]


class Agent:
    """A trajectory of several turns, in a thread."""

    def __init__(self, live: LiveServer, run: str, number: int, plan: list[tuple[Any, ...]]) -> None:
        self.live, self.run, self.seed, self.plan = live, run, number, plan
        self.name = f"agent-{number}"
        self.rid = ""
        self.asked: dict[str, list[int]] = {}
        """The prompt of each leg, by rid."""
        self.answers: dict[str, dict[str, Any]] = {}
        self.may_be_aborted: set[str] = set()
        self.rejected = False
        self.disconnects = threading.Event()
        self.ended = live.in_background(self._play)

    def _play(self) -> None:
        history = [7, 8, 9 + self.seed % 400]
        for number, (length, tool, delay, edited, streams) in enumerate(self.plan):
            self.rid = f"{self.run}-{self.name}-{number}"
            self.asked[self.rid] = list(history)
            answer = self._ask(self.rid, history, length, streams=streams)
            if answer is not None:
                self.answers[self.rid] = answer
                history += answer["output_ids"]
            elif self.rejected:
                return
            history += [10 + (number + i) % 50 for i in range(tool)]
            if edited:
                history[-edited:] = [60 + number, 61]
            time.sleep(delay)
        while not self.rejected and self._done() == 503:
            time.sleep(0.02)

    def _ask(self, rid: str, ids: list[int], length: int, *, streams: bool) -> dict[str, Any] | None:
        """None: the trajectory was rejected before, or this client has gone."""
        params = {**PARAMS, "sampling_seed": self.seed, "max_new_tokens": length, "ignore_eos": True}
        body = {"rid": rid, "input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": streams}
        headers = {"x-april-run": self.run, "x-april-trajectory": self.name}
        answer = None
        with (
            httpx.Client(base_url=self.live.server.url, timeout=LIMIT_S, headers=headers) as http,
            http.stream("POST", "/generate", json=body) as response,
        ):
            if response.status_code == 400:
                assert self.rejected, response.read()
                return None
            for line in response.iter_lines():
                if line.removeprefix("data: ").startswith("{"):
                    answer = json.loads(line.removeprefix("data: "))
                    if "error" in answer:  # aborted while SGLang held it under a pause: it has never begun
                        assert rid in self.may_be_aborted, answer
                        break
                    assert "output_ids" in answer, answer
                if streams and self.disconnects.is_set():
                    self.disconnects.clear()
                    self.may_be_aborted.add(rid)
                    return None
        assert answer is not None
        return self._ask(rid, ids, length, streams=streams) if "error" in answer else dict(answer)

    def _done(self) -> int:
        body = {"run": self.run, "trajectories": {self.name: {"reward": 0.5}}}
        status = self.live.server.http.post("/april/trajectories/done", json=body).status_code
        assert status in (200, 503) or self.rejected, status
        return status

    def check(self, known: dict[str, Any], oracle: Oracle) -> list[ReplayResult]:
        """Compare the delivered record with what the agent sent and got."""
        legs = {leg["leg"]: leg for leg in known["legs"]}
        assert len({leg["rid"] for leg in legs.values()}) == len(legs)
        assert self.answers.keys() <= {leg["rid"] for leg in legs.values()} <= self.asked.keys()
        ids: dict[int, list[int]] = {}
        for number, leg in sorted(legs.items()):
            before = ids[leg["parent"]][: leg["shared"]] if leg["parent"] is not None else []
            assert [*before, *leg["prompt_ids"]] == self.asked[leg["rid"]]
            ids[number] = [*self.asked[leg["rid"]], *leg["output_ids"]]
            if (answer := self.answers.get(leg["rid"])) is not None:
                assert answer["output_ids"] == leg["output_ids"]
                assert [x for x, *_ in answer["meta_info"]["output_token_logprobs"]] == leg["logprobs"]
                assert answer["meta_info"]["april"]["spans"] == leg["spans"]
            if leg["finish_reason"]["type"] == "abort":
                assert leg["rid"] in self.may_be_aborted
            assert leg["reused"] + leg["prefilled"] == len(self.asked[leg["rid"]])
        drawn = [leg for leg in legs.values() if leg["output_ids"]]
        return [self._replay(leg, legs, ids[leg["leg"]], oracle) for leg in drawn]

    def _replay(
        self, leg: dict[str, Any], legs: dict[int, dict[str, Any]], ids: list[int], oracle: Oracle
    ) -> ReplayResult:
        """Replay a leg behind the KV of all legs that it continues."""
        chain = [leg]
        # A leg that was aborted before its first token has no spans, and passes on the KV that it was given.
        while not chain[0]["spans"] or chain[0]["spans"][0]["kv"] == "kept":
            parent = legs[chain[0]["parent"]]
            assert chain[0]["shared"] == len(self.asked[parent["rid"]]) + len(parent["output_ids"])
            chain.insert(0, parent)
        prompt = self.asked[chain[0]["rid"]]
        spans: list[dict[str, Any]] = []
        for part in chain:
            offset = len(self.asked[part["rid"]]) - len(prompt)
            if spans and part["spans"]:  # an earlier leg may have computed the KV of its last token as well
                spans[-1]["end"] = part["reused"] + 1 - len(prompt)
            for span in part["spans"]:
                start = spans[-1]["end"] if spans else 0
                spans.append({**span, "start": start, "end": offset + span["end"]})
        own, output = len(leg["output_ids"]), torch.tensor(ids[len(prompt) :])
        rows = processed(oracle.replay(prompt, output.tolist(), spans), output.tolist(), PARAMS)[-own:]
        got = torch.tensor(leg["logprobs"], dtype=torch.float64)
        error = float((logprobs_of(rows, output[-own:]) - got).abs().max())
        where = f"{leg['rid']} {spans}"
        assert error < LOGPROB_LIMIT, f"{where}: logprobs are off by {error}"
        wrong = mismatched_tokens(rows, output[-own:], len(ids) - own, self.seed, PARAMS)
        assert not wrong, f"{where}: tokens {wrong} were not drawn from these weights"
        result = ReplayResult(error, wrong)
        oracle.add_drift(result, self.asked[leg["rid"]], leg, PARAMS)
        return result


class Story(StoryOperations):
    """Operations one after the other beside agents, and a trainer that opens one round after the other."""

    def __init__(self, live: LiveServer, run: str, kv: str, quotas: list[int], agents: list[Agent]) -> None:
        super().__init__(live)
        self.run, self.kv, self.agents = run, kv, agents
        self.delivered: list[dict[str, Any]] = []
        self.over = False
        self.first = open_round(live, run, quota=quotas[0], kv=kv, round_id=f"{run}-0")
        self.rounds = live.in_background(self._rounds, quotas)

    def _rounds(self, quotas: list[int]) -> None:
        self.delivered += self.live.result_of(self.first)["trajectories"]
        for number in itertools.count(1):
            if self.over:
                return
            self.delivered += self._round(number, quotas[number % len(quotas)])

    def _round(self, number: int, quota: int) -> list[dict[str, Any]]:
        """Repeated while the server is closed, because a push has begun."""
        body = {"run": self.run, "round_id": f"{self.run}-{number}", "quota_unit": "trajectory", "quota": quota}
        while (answer := self.live.server.http.post("/april/rollout", json=body | {"kv": self.kv})).status_code == 503:
            time.sleep(0.02)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["trajectories"])

    def play(self, plan: list[tuple[Any, ...]]) -> list[ReplayResult]:
        """Returns the comparison of each leg with its replay."""
        for name, *given_values in plan:
            getattr(self, name)(*given_values)
        self.unpause()
        for agent in self.agents:
            agent.ended.result(LIMIT_S)
        self.over = True
        until(self._stopped, "the last round ends")
        self.rounds.result()
        names = [agent.name for agent in self.agents if not agent.rejected]
        if left := len(names) - len(self.delivered):
            self.delivered += self._round(10**6, left)
        assert sorted(known["id"] for known in self.delivered) == names
        until(lambda: self.live.server.state()["attached"] == {}, "no request is left")
        state = self.live.server.state()
        assert (sum(state["samples"].values()), state["pool"]["held"], state["parked_tokens"]) == (0, 0, 0)
        oracle, agents = Oracle(self.live.policies), {agent.name: agent for agent in self.agents}
        return [result for known in self.delivered for result in agents[known["id"]].check(known, oracle)]

    def _stopped(self) -> bool:
        """Ends a round that waits for trajectories which have been rejected."""
        for name in self.live.server.state()["http"]["rounds"]:
            self.live.server.http.post(f"/april/rounds/{name}/stop")
        return self.rounds.done()

    def abort(self, number: int) -> None:
        agent = self.agents[number % len(self.agents)]
        rid = agent.rid
        agent.may_be_aborted.add(rid)
        self.live.server.post("/abort_request", {"rid": rid})

    def disconnect(self, number: int) -> None:
        """Of the next turn that streams."""
        self.agents[number % len(self.agents)].disconnects.set()

    def reject(self, number: int) -> None:
        """One that is not done. It may be unknown: its first request is on its way, or held under a pause."""
        agent = self.agents[number % len(self.agents)]
        if agent.rejected:
            return
        agent.rejected = True
        body = {"run": self.run, "reject": [agent.name]}
        answer = self.live.server.http.post("/april/trajectories/done", json=body)
        agent.rejected = answer.status_code == 200
        assert answer.status_code in (200, 409), answer.text


def test_stories(live: LiveServer, run: str) -> None:
    numbers, runs = itertools.count(1000), itertools.count()
    played: list[list[ReplayResult]] = []

    @hypothesis.seed(SEED)
    @settings(max_examples=STORIES, deadline=None, database=None, phases=PHASES)
    @example(kv="keep", quotas=[1], plans=[[LONG_TURN] * 4] * 3, plan=PUSHES)  # draws on KV of an older version
    @given(
        kv=st.sampled_from(["keep", "keep", "auto", "recompute"]),
        quotas=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        plans=st.lists(st.lists(turns, min_size=1, max_size=4), min_size=2, max_size=4),
        plan=st.lists(operations, min_size=4, max_size=10),
    )
    def stories(kv: str, quotas: list[int], plans: list[list[Any]], plan: list[tuple[Any, ...]]) -> None:
        own = f"{run}-{next(runs)}"  # a story that hypothesis repeats has a run of its own
        agents = [Agent(live, own, next(numbers), agent) for agent in plans]
        played.append(Story(live, own, kv, quotas, agents).play([("wait", 2), *plan]))

    with live.server.slowed(0.005):
        stories()
    legs = [leg for story in played for leg in story]
    assert len(played) > STORIES
    assert len(legs) > 2 * STORIES
    assert any(leg.kept for leg in legs), "no leg was drawn on KV of an older version"
    print(f"{len(played)} stories, {len(legs)} legs with exact tokens; {drift_of(legs)}")
