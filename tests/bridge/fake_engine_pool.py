"""Fake engines with verdicts, stops and carry. Each finishes groups on the thread that reads its stream."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang_april.client import AprilError
from sglang_april.client.types import RolloutGroup, RolloutSample, RolloutSummary, Span


@dataclass(eq=False)
class EngineRound:
    """A round at one engine."""

    body: dict[str, Any]
    streamed: list[str] = field(default_factory=list)
    ended: RolloutSummary | None = None
    verdicts: dict[str, bool] = field(default_factory=dict)
    """Those of a round that has ended."""


class FakePoolEngine:
    """Finishes groups in order of arrival, up to `may_finish` of them."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.finished: list[str] = []
        self.verdicts: dict[str, bool] = {}
        self.delivered: list[str] = []
        self.mandatory: set[str] = set()
        self.rounds: dict[str, EngineRound] = {}
        self.bodies: list[dict[str, Any]] = []
        self.may_finish = 10**6
        self.dies_after: int | None = None
        self.disk_full = False
        """Replies are fixed, but wait for the journal."""
        self.changed = threading.Condition()
        self.version = 0

    # The interface of a client

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        with self.changed:
            self.bodies.append(body)
            engine_round = self.rounds.get(body["round_id"])
            if engine_round is None:
                taken = {*self.waiting, *self.finished}
                assert not taken & {prompt["id"] for prompt in body["prompts"]}, "409: still undelivered"
                self.waiting += [prompt["id"] for prompt in body["prompts"]]
                engine_round = self.rounds[body["round_id"]] = EngineRound(body)
                engine_round.streamed += [name for name in self.finished if name not in self.verdicts]
            assert engine_round.body == body, "409: the same id with another body"
        return self._events(engine_round)

    def state(self) -> dict[str, Any]:
        with self.changed:
            mandatory = [name for name in self.mandatory if name in self.waiting]
            rows = [
                {
                    "round_id": name,
                    "run": engine_round.body["run"],
                    "counted": sum(self.verdicts.values()),
                    "mandatory": mandatory,
                }
                for name, engine_round in self.rounds.items()
                if engine_round.ended is None
            ]
            return {"rounds": rows, "policy_version": self.version}

    def partials(self, _run: str) -> dict[str, Any]:
        with self.changed:
            return {"groups": [{"id": name} for name in self.finished + self.waiting]}

    def push_begin(self, version: int) -> None:
        assert version > self.version, "409: a push must name a greater version"

    def push_end(self, version: int) -> None:
        self.version = version

    def get_round(self, round_id: str) -> Any:
        if round_id not in self.rounds:
            raise AprilError(404, "round_id", "there is none")
        ended = self.rounds[round_id].ended
        if ended is None or self.disk_full:
            return None
        return SimpleNamespace(
            finished=[SimpleNamespace(id=named["id"], accepted=named["accepted"]) for named in ended.delivered]
        )

    def judge(self, round_id: str, accept: Iterable[str] = (), reject: Iterable[str] = ()) -> dict[str, Any]:
        with self.changed:
            engine_round, new = self.rounds[round_id], dict.fromkeys(accept, True) | dict.fromkeys(reject, False)
            if engine_round.ended is not None:
                if any(engine_round.verdicts.get(name, verdict) != verdict for name, verdict in new.items()):
                    raise AprilError(409, "round_id", "has ended")
                late = [name for name in new if name not in engine_round.verdicts]
                return {"accepted": sum(engine_round.verdicts.values()), "late": late}
            assert new.keys() <= set(self.finished), "409: has not finished"
            self.verdicts |= new
            self.changed.notify_all()
            return {"accepted": sum(self.verdicts.values()), "late": []}

    def extend(self, round_id: str, quota_add: int, prompts: list[dict[str, Any]]) -> None:
        with self.changed:
            if self.rounds[round_id].ended is not None:
                raise AprilError(409, "round_id", "has ended")
            assert quota_add == 0
            if {prompt["id"] for prompt in prompts} & {*self.waiting, *self.finished}:
                raise AprilError(409, "prompts[0].id", "is still undelivered")
            self.waiting += [prompt["id"] for prompt in prompts]
            self.changed.notify_all()

    def stop(self, round_id: str) -> None:
        with self.changed:
            if self.rounds[round_id].ended is None:
                self._end(self.rounds[round_id], "stopped")

    # Simulation

    def _events(self, engine_round: EngineRound) -> Iterator[RolloutGroup | RolloutSummary]:
        sent = 0
        while True:
            with self.changed:
                while sent == len(engine_round.streamed) and not self._is_dead(sent):
                    if engine_round.ended is None:
                        self._advance(engine_round)
                    elif self.disk_full:
                        self.changed.wait()
                    else:
                        break
                if self._is_dead(sent):
                    raise ConnectionError("the engine died")
                event = group(engine_round.streamed[sent]) if sent < len(engine_round.streamed) else engine_round.ended
            sent += 1
            assert event is not None
            yield event
            if isinstance(event, RolloutSummary):
                return

    def _is_dead(self, sent: int) -> bool:
        return self.dies_after is not None and sent >= self.dies_after

    def _advance(self, engine_round: EngineRound) -> None:
        """Finish a group or exhaust the round; else wait for a verdict, a stop or another prompt."""
        if self.waiting and self.may_finish:
            self.may_finish -= 1
            name = self.waiting.pop(0)
            self.finished.append(name)
            engine_round.streamed.append(name)
        elif not self.waiting and (
            engine_round.body["count"] == "finished" or set(self.finished) <= set(self.verdicts)
        ):
            self._end(engine_round, "exhausted")
        else:
            self.changed.wait()

    def _end(self, engine_round: EngineRound, reason: Any) -> None:
        judged = engine_round.body["count"] == "accepted"
        names = [name for name in self.finished if not judged or name in self.verdicts]
        engine_round.streamed += [name for name in names if name not in engine_round.streamed]
        rows = [
            {"id": name, "incarnation": 0, "indices": [0, 1], "complete": True, "accepted": self.verdicts.get(name)}
            for name in names
        ]
        self.finished = [name for name in self.finished if name not in names]
        engine_round.verdicts, self.verdicts = self.verdicts, {}
        self.delivered += names
        stats = {"duration_s": 1.0, "mean_running": 2.0, "over_bound": 1, "timeline": [[0.0, 2], [0.5, 1]]}
        stats |= {"tokens_after_quota": 0, "reprefilled_tokens": 0}
        carried = {"groups": len(self.waiting) + len(self.finished), "tokens": 0}
        engine_round.ended = RolloutSummary(
            engine_round.body["round_id"],
            engine_round.body["run"],
            self.version,
            reason,
            rows,
            carried,
            stats,
            [replace(group(name), accepted=row["accepted"]) for name, row in zip(names, rows, strict=True)],
        )
        self.changed.notify_all()


def group(name: str) -> RolloutGroup:
    """A finished group of two samples."""
    ids = np.array([7, 8], dtype=np.int32)
    spans = [Span(0, 2, 1, "fresh")]
    samples = [
        RolloutSample(i, ids, "", {"type": "stop"}, 0, np.zeros(2, np.float32), "processed", spans) for i in range(2)
    ]
    return RolloutGroup(name, 0, None, ids, True, None, samples)
