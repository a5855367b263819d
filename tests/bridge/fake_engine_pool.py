"""Engines in memory with the verdicts, stops and carry of S3, each finishing groups on the thread that follows it."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang_april.client import AprilError
from sglang_april.client.types import RolloutGroup, RolloutSample, RolloutSummary, Span


@dataclass(eq=False)
class RoundShare:
    """An engine's part of a round."""

    body: dict[str, Any]
    shown: list[str] = field(default_factory=list)
    ended: RolloutSummary | None = None


class FakeEngine:
    """Groups finish in the order of their arrival, as many as `may_finish` allows."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.finished: list[str] = []
        self.verdicts: dict[str, bool] = {}
        self.delivered: list[str] = []
        self.mandatory: set[str] = set()
        self.rounds: dict[str, RoundShare] = {}
        self.bodies: list[dict[str, Any]] = []
        self.may_finish = 10**6
        self.dies_after: int | None = None
        self.turn = threading.Condition()

    # The calls of a client

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        with self.turn:
            self.bodies.append(body)
            part = self.rounds.get(body["round_id"])
            if part is None:
                taken = {*self.waiting, *self.finished}
                assert not taken & {prompt["id"] for prompt in body["prompts"]}, "409: still undelivered"
                self.waiting += [prompt["id"] for prompt in body["prompts"]]
                part = self.rounds[body["round_id"]] = RoundShare(body)
                part.shown += [name for name in self.finished if name not in self.verdicts]
            assert part.body == body, "409: the same id with another body"
        return self._events(part)

    def state(self) -> dict[str, Any]:
        with self.turn:
            left = [name for name in self.mandatory if name in self.waiting]
            rows = [
                {"round_id": name, "counted": sum(self.verdicts.values()), "mandatory": left}
                for name, part in self.rounds.items()
                if part.ended is None
            ]
            return {"rounds": rows}

    def get_round(self, round_id: str) -> Any:
        if round_id not in self.rounds:
            raise AprilError(404, "round_id", "there is none")
        ended = self.rounds[round_id].ended
        groups = [] if ended is None else [SimpleNamespace(accepted=named["accepted"]) for named in ended.delivered]
        return None if ended is None else SimpleNamespace(finished=groups)

    def judge(self, round_id: str, accept: Iterable[str] = (), reject: Iterable[str] = ()) -> dict[str, int]:
        with self.turn:
            if self.rounds[round_id].ended is not None:
                raise AprilError(409, "round_id", "has ended")
            assert {*accept, *reject} <= set(self.finished), "409: has not finished"
            self.verdicts |= dict.fromkeys(accept, True) | dict.fromkeys(reject, False)
            self.turn.notify_all()
            return {"accepted": sum(self.verdicts.values())}

    def extend(self, round_id: str, quota_add: int, prompts: list[dict[str, Any]]) -> None:
        with self.turn:
            if self.rounds[round_id].ended is not None:
                raise AprilError(409, "round_id", "has ended")
            assert quota_add == 0
            if {prompt["id"] for prompt in prompts} & {*self.waiting, *self.finished}:
                raise AprilError(409, "prompts[0].id", "is still undelivered")
            self.waiting += [prompt["id"] for prompt in prompts]
            self.turn.notify_all()

    def stop(self, round_id: str) -> None:
        with self.turn:
            if self.rounds[round_id].ended is None:
                self._end(self.rounds[round_id], "stopped")

    # What goes on inside

    def _events(self, part: RoundShare) -> Iterator[RolloutGroup | RolloutSummary]:
        said = 0
        while True:
            with self.turn:
                while said == len(part.shown) and part.ended is None and not self._dead(said):
                    self._go_on(part)
                if self._dead(said):
                    raise ConnectionError("the engine died")
                event = group(part.shown[said]) if said < len(part.shown) else part.ended
            said += 1
            assert event is not None
            yield event
            if isinstance(event, RolloutSummary):
                return

    def _dead(self, said: int) -> bool:
        return self.dies_after is not None and said >= self.dies_after

    def _go_on(self, part: RoundShare) -> None:
        """One group finishes; or the round is exhausted; or it waits for a verdict, a stop or another prompt."""
        if self.waiting and self.may_finish:
            self.may_finish -= 1
            name = self.waiting.pop(0)
            self.finished.append(name)
            part.shown.append(name)
        elif not self.waiting and (part.body["count"] == "finished" or set(self.finished) <= set(self.verdicts)):
            self._end(part, "exhausted")
        else:
            self.turn.wait()

    def _end(self, part: RoundShare, reason: Any) -> None:
        judged = part.body["count"] == "accepted"
        names = [name for name in self.finished if not judged or name in self.verdicts]
        part.shown += [name for name in names if name not in part.shown]
        rows = [
            {"id": name, "incarnation": 0, "indices": [0, 1], "complete": True, "accepted": self.verdicts.get(name)}
            for name in names
        ]
        self.finished = [name for name in self.finished if name not in names]
        self.verdicts = {}
        self.delivered += names
        stats = {"duration_s": 1.0, "mean_running": 2.0, "over_bound": 1, "timeline": [[0.0, 2], [0.5, 1]]}
        stats |= {"tokens_after_quota": 0, "reprefilled_tokens": 0}
        left = {"groups": len(self.waiting) + len(self.finished)}
        part.ended = RolloutSummary(part.body["round_id"], part.body["run"], 1, reason, rows, left, stats)
        self.turn.notify_all()


def group(name: str) -> RolloutGroup:
    """A finished group of two samples."""
    ids = np.array([7, 8], dtype=np.int32)
    spans = [Span(0, 2, 1, "fresh")]
    samples = [
        RolloutSample(i, ids, "", {"type": "stop"}, 0, np.zeros(2, np.float32), "processed", spans) for i in range(2)
    ]
    return RolloutGroup(name, 0, None, ids, True, None, samples)
