"""Attached requests and legs of trajectories in a `FaultLoop`, asked until they are answered (`attached-request`).

What has been asked is a file beside the journal; what has been answered, the client in the parent process knows. So an
epoch asks again what an earlier one has left unanswered, as the client of a killed server does.
"""

import json
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from sglang_april.api import messages
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_request import Request, seed_of, token
from tests.unit.recount import spans_of

AGENTS = "agents"
PROMPT = [5, 6, 7]
MAX_PENDING = 6
MAX_TOKENS = 40
"""Of a leg with all that it extends; the pool has 60."""


class Asked(NamedTuple):
    """One request; `trajectory` is empty if it is not a leg."""

    rid: str
    length: int
    trajectory: str
    prompt: list[int] = PROMPT


class FaultedRequests:
    """What one epoch asks of its engine."""

    def __init__(self, engine: FakeEngine, folder: Path, answered: set[str], rng: Random, epoch: int) -> None:
        self._engine, self._rng, self._epoch = engine, rng, epoch
        self._file = folder / "asked"
        asked = read(folder)
        self.answered = set(answered)
        self._left = [one for one in asked if one.rid not in answered]
        """Asked in an earlier epoch."""
        self._numbers = len(asked)
        self.pending: dict[str, Request | None] = {}
        """The engine's requests, which stay with SGLang; None until the engine has queued it."""
        self._at_once: set[str] = set()
        """Those that the journal, or a refusal, may answer before the engine queues them."""
        self._asked: dict[str, Asked] = {}
        self._histories: dict[str, list[int]] = {}
        """Prompt and output of the last leg of each trajectory that has been answered in this epoch."""

    def ask(self) -> None:
        """Ask again what is left, or something new."""
        if len(self.pending) >= MAX_PENDING:
            return
        if self._left and self._rng.random() < 0.5:
            self._send(self._left.pop(self._rng.randrange(len(self._left))))
            return
        self._numbers += 1
        trajectory = f"t{self._rng.randrange(3)}.{self._epoch}" if self._rng.random() < 0.7 else ""
        if self._histories and self._rng.random() < 0.7:
            trajectory = self._rng.choice(list(self._histories))
        length, history = self._rng.choice((1, 6, 30)), self._histories.get(trajectory, [])
        extends = history and len(history) + 1 + length <= MAX_TOKENS
        prompt = [*history, self._numbers] if extends else PROMPT
        one = Asked(f"q{self._epoch}.{self._numbers}", length, trajectory, prompt)
        with self._file.open("a") as out:
            out.write(json.dumps(one) + "\n")
        self._send(one)

    def ask_all(self) -> None:
        """Ask again everything that is left."""
        while self._left:
            self._send(self._left.pop())

    def _send(self, one: Asked) -> None:
        self.pending[one.rid], self._asked[one.rid] = None, one
        self._at_once.add(one.rid)
        names = (one.trajectory,) if one.trajectory else ()
        sample = self._engine.attach_request(AGENTS, one.rid, one.prompt, one.length, *names)
        request = sample.request if sample is not None else None
        if request is not None:
            self._at_once.discard(one.rid)
        if one.rid in self.pending:
            self.pending[one.rid] = request

    def abort(self) -> None:
        """The client of a request disconnects."""
        if self.pending:
            self._engine.abort_request(self._rng.choice(list(self.pending)))

    def leg_ended(self, leg: messages.LegEnded) -> None:
        """The next leg of its trajectory may extend it."""
        output = np.frombuffer(leg.result.output_ids, "<i4").tolist()
        assert output == [token(seed_of(leg.rid), t) for t in range(len(output))]
        self._histories[leg.trajectory] = [*self._asked[leg.rid].prompt, *output]

    def ended(self, event: messages.EndedRequest) -> None:
        """The engine answers a request: once, with its tokens and spans."""
        assert event.rid not in self.answered, f"{event.rid} is answered twice"
        self.answered.add(event.rid)
        request = self.pending.pop(event.rid)
        assert request is not None or event.rid in self._at_once
        if request is not None:
            assert request.output == [token(seed_of(event.rid), t) for t in range(len(request.output))]
            assert event.spans == spans_of(request)
            assert request.reason["type"] == "abort" or len(request.output) == request.max_new


def read(folder: Path) -> list[Asked]:
    """Everything that was asked, over all epochs."""
    file = folder / "asked"
    return [Asked(*json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
