"""Controllers on the fake engine whose requests are legs of trajectories; replicas must decide alike."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from sglang_april.api import messages
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_request import seed_of, token
from tests.unit.recount import recount

PROMPT = [5, 6, 7]


def told_of(event: messages.Event) -> list[messages.EndedRequest]:
    """The ends of attached requests that an event tells."""
    if isinstance(event, messages.LegEnded):
        return [messages.EndedRequest(event.rid, event.result.spans, event.policy_version)]
    return event.requests if isinstance(event, messages.AttachedEnded) else []


class LegHarness:
    def __init__(self, replicas: int = 2, **engine: Any) -> None:
        self.engines = [FakeEngine(**engine) for _ in range(replicas)]
        self.engine = self.engines[0]
        self.context = self.engine.controller.context
        self.sent: list[list[bytes]] = [[] for _ in self.engines]
        self.events: list[messages.Event] = []
        for i, e in enumerate(self.engines):
            e.on_event = lambda event, i=i: self._receive(i, event)
        self.legs: dict[str, messages.LegEnded] = {}
        """Those that have ended, by `rid`."""
        self.seq = 0
        self.rids: dict[str, list[int]] = {}
        """Prompts by `rid`."""

    def _receive(self, replica: int, event: messages.Event) -> None:
        stable = msgspec.structs.replace(event, stats={}) if isinstance(event, messages.RoundEnded) else event
        self.sent[replica].append(messages.encode(stable))
        if replica == 0:
            self.events.append(event)
            if isinstance(event, messages.LegEnded):
                assert event.rid not in self.legs, "a request ends twice"
                self.legs[event.rid] = event
                output = np.frombuffer(event.result.output_ids, "<i4").tolist()
                assert output == [token(seed_of(event.rid), t) for t in range(len(output))]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def answered(self) -> list[messages.EndedRequest]:
        """Attached requests that have ended, in order."""
        return [request for event in self.events for request in told_of(event)]

    def do(self, act: Callable[[FakeEngine], Any]) -> Any:
        results = [act(e) for e in self.engines]
        self.check()
        return results[0]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.do(FakeEngine.step)

    def command(self, kind: type[messages.Command], **fields: Any) -> messages.Answer:
        self.seq += 1
        data = messages.encode(kind(seq=self.seq, **fields))
        self.do(lambda e: e.controller.command(messages.decode_message(data)))
        answer: messages.Answer = next(a for a in reversed(self.of(messages.Answer)) if a.seq == self.seq)
        return answer

    def leg(self, run: str, rid: str, ids: list[int], length: int, *names: str) -> bool:
        """A request; False if it is refused."""
        self.rids[rid] = list(ids)
        return self.do(lambda e: e.attach_request(run, rid, ids, length, *names)) is not None

    def abort(self, rid: str) -> None:
        self.do(lambda e: e.abort_request(rid))

    def open(self, run: str, quota: int | None, **fields: Any) -> messages.Answer:
        spec = {"kv": "keep", "max_staleness": None, "quota_unit": "trajectory", "trajectories": True, **fields}
        given = messages.RoundSpec(f"r{self.seq}", run, quota, **spec)
        return self.command(messages.OpenRound, spec=given, prompts=[], params=[])

    def stop(self, run: str) -> None:
        rnd = next(r for r in self.context.rounds.values() if r.spec.run == run)
        self.command(messages.StopRound, round_id=rnd.spec.round_id)

    def done(self, run: str, *done: str, reject: tuple[str, ...] = ()) -> messages.Answer:
        return self.command(messages.EndTrajectories, run=run, done=dict.fromkeys(done, b""), reject=list(reject))

    def push(self) -> None:
        self.command(messages.PushBegin)
        self.command(messages.PushEnd)

    def ended(self, rid: str) -> messages.LegEnded | None:
        """The leg, once it has ended."""
        return self.legs.get(rid)

    def sequence(self, rid: str) -> list[int]:
        """Prompt and output of an ended leg."""
        leg = self.ended(rid)
        assert leg is not None
        return [*self.rids[rid], *np.frombuffer(leg.result.output_ids, "<i4").tolist()]

    def running(self) -> set[str]:
        return {r.name for r in [*self.engine.running, *self.engine.waiting] if r.sample is not None}

    def check(self) -> None:
        recount(self.engine, self.context.ledger)
        assert all(sent == self.sent[0] for sent in self.sent)
        for sent in self.sent:
            sent.clear()
        for run in self.context.trajectories.values():
            for trajectory in run.active.values():
                assert all(leg.trajectory is trajectory for leg in trajectory.pending.values())
                assert {s.group.id for s in trajectory.pending} <= run.legs.groups.keys()
