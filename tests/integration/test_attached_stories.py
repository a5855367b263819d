"""Drawn stories of attached requests, pauses, pushes, aborts, disconnects, flushes and rounds (`attached-request`).

Every request that no one aborts is answered once, with exact tokens and logprobs; an aborted one has a part of them.
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
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.live import LiveServer, until
from tests.support.oracle import ReplayResult, drift_of
from tests.support.story_operations import SHARED_OPERATIONS, StoryOperations
from tests.support.workload import prompt

SEED, STORIES = int(os.environ.get("APRIL_SEED", "0")), int(os.environ.get("APRIL_STORIES", "10"))
PARAMS: dict[str, Any] = {"temperature": 0.8}
HEADERS = {"x-april-run": "stories"}
LIMIT_S = 300.0

operations = st.one_of(
    *SHARED_OPERATIONS,
    st.tuples(st.just("ask"), st.integers(8, 50), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("abort_all")),
    st.tuples(st.just("disconnect"), st.integers(0, 9)),
    st.tuples(st.just("round"), st.integers(1, 2)),
)


class Client:
    """One attached request, streaming or not."""

    def __init__(self, live: LiveServer, number: int, length: int, *, streams: bool) -> None:
        self.rid, self.length, self.prompt = f"story-{number}", length, [7, 8, 9 + number % 400]
        self.seed, self.streams = number, streams
        self.may_be_aborted = self.disconnected = False
        self.chunks: list[dict[str, Any]] = []
        self.status = 0
        self._stop = threading.Event()
        self.done = live.in_background(self._run, live.server.url)

    def _run(self, url: str) -> None:
        params = {**PARAMS, "sampling_seed": self.seed, "max_new_tokens": self.length, "ignore_eos": True}
        body = {"rid": self.rid, "input_ids": self.prompt, "sampling_params": params, "return_logprob": True}
        with httpx.Client(base_url=url, timeout=LIMIT_S, headers=HEADERS) as http:
            if not self.streams:
                answer = http.post("/generate", json=body)
                self.status = answer.status_code
                self.chunks = [answer.json()] if self.status == 200 else []
                return
            with http.stream("POST", "/generate", json={**body, "stream": True}) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.chunks.append(json.loads(line[6:]))
                    if self._stop.is_set():
                        return

    def disconnect(self) -> None:
        """Noticed with the next chunk; one that does not stream stays."""
        if self.streams and not self.done.done():
            self.disconnected = True
            self._stop.set()

    def check(self) -> dict[str, Any] | None:
        """Every chunk extends the one before. Returns the sample, if there is an answer with tokens."""
        chunks = [chunk for chunk in self.chunks if "output_ids" in chunk]
        for before, after in itertools.pairwise(chunks):
            known = len(before["output_ids"])
            aborted = (after["meta_info"]["finish_reason"] or {}).get("type") == "abort"
            assert len(after["output_ids"]) > known - aborted, "a chunk without a new token"
            assert after["output_ids"][:known] == before["output_ids"]
        ended = bool(chunks) and chunks[-1]["meta_info"]["finish_reason"] is not None
        if not ended:
            assert self.may_be_aborted or self.disconnected, (self.rid, self.status, self.chunks[-1:])
            return None
        answer = chunks[-1]
        meta, ids = answer["meta_info"], answer["output_ids"]
        if meta["finish_reason"]["type"] == "abort":
            assert self.may_be_aborted or self.disconnected, self.rid
        else:
            assert meta["finish_reason"] == {"type": "length", "length": self.length}
            assert len(ids) == self.length
        if not ids:
            return None
        assert len(meta["output_token_logprobs"]) == len(ids)
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        spans = meta["april"]["spans"]
        sample = {"index": 0, "output_ids": ids, "logprobs": logprobs, "spans": spans, "seed": self.seed}
        return {"id": self.rid, "prompt_ids": self.prompt, "samples": [sample]}


class AttachedStory(StoryOperations):
    """Operations one after the other, while clients wait for their answers."""

    def __init__(self, live: LiveServer, numbers: "itertools.count[int]", run: str) -> None:
        super().__init__(live)
        self.numbers, self.run = numbers, run
        self.clients: list[Client] = []
        self.rounds: list[Any] = []
        self.asked: list[str] = []
        self.delivered: list[dict[str, Any]] = []

    def play(self, plan: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Returns everything that was sampled."""
        for name, *given_values in plan:
            getattr(self, name)(*given_values)
        self.unpause()
        for round_ in self.rounds:
            self.delivered += self.live.result_of(round_)["finished"]
        self.delivered += self.live.server.drain(self.run)
        assert sorted(group["id"] for group in self.delivered) == sorted(self.asked)
        for client in self.clients:
            client.done.result(LIMIT_S)
        until(lambda: self.live.server.state()["attached"] == {}, "no request is left")
        state = self.live.server.state()
        assert (sum(state["samples"].values()), state["pool"]["held"]) == (0, 0)
        return [*self.delivered, *(group for client in self.clients if (group := client.check()) is not None)]

    def ask(self, length: int, streams: bool) -> None:
        self.clients.append(Client(self.live, next(self.numbers), length, streams=streams))

    def abort(self, number: int) -> None:
        if self.clients:
            client = self.clients[number % len(self.clients)]
            client.may_be_aborted = True
            self.live.server.post("/abort_request", {"rid": client.rid})

    def abort_all(self) -> None:
        """Every request in flight, and open rounds, unless generation is paused."""
        for client in self.clients:
            client.may_be_aborted |= not client.done.done()
        self.live.server.post("/abort_request", {"abort_all": True})

    def disconnect(self, number: int) -> None:
        if self.clients:
            self.clients[number % len(self.clients)].disconnect()

    def round(self, quota: int) -> None:
        """In the background; while one is open, or under a pause, none is begun."""
        if self.paused or any(not round_.done() for round_ in self.rounds):
            return
        ids = [f"{self.run}-{next(self.numbers)}" for _ in range(2)]
        self.asked += ids
        prompts = [prompt(name, 10 + 20 * i, **PARAMS) for i, name in enumerate(ids)]
        self.rounds.append(self.live.in_background(self._roll_out, prompts, quota))

    def _roll_out(self, prompts: list[dict[str, Any]], quota: int) -> dict[str, Any]:
        """As a trainer: repeated while the server is closed, because a push has begun before the round arrived."""
        body = {"run": self.run, "prompts": prompts, "quota": quota}
        while (answer := self.live.server.http.post("/april/rollout", json=body)).status_code == 503:
            time.sleep(0.02)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def test_stories(live: LiveServer, run: str) -> None:
    numbers, runs = itertools.count(1), itertools.count()
    played: list[int] = []
    replays: list[ReplayResult] = []

    @hypothesis.seed(SEED)
    @settings(max_examples=STORIES, deadline=None, database=None, phases=[Phase.generate])
    @given(
        asked=st.lists(st.tuples(st.integers(20, 60), st.booleans()), min_size=1, max_size=3),
        plan=st.lists(operations, min_size=4, max_size=10),
    )
    def stories(asked: list[tuple[int, bool]], plan: list[tuple[Any, ...]]) -> None:
        story = AttachedStory(live, numbers, f"{run}-{next(runs)}")
        sampled = story.play([*(("ask", *one) for one in asked), ("wait", 2), *plan])
        replays.extend(live.check(sampled, {group["id"]: PARAMS for group in sampled}))
        played.append(len(sampled))

    with live.server.slowed(0.005):
        stories()
    assert len(played) >= STORIES
    assert sum(played) >= STORIES
    print(f"{len(played)} stories, {sum(played)} answers with exact tokens; {drift_of(replays)}")
