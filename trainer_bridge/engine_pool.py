"""Several engines behind the calls of one: prompts are spread over them, one quota is counted over all.

A round opens on each with `quota: null` and `count: accepted`. As groups finish anywhere, they are accepted where they
are until the quota is met; then every engine is told to stop, and delivers what was accepted there (S3). The verdicts
are kept by the engines, in their journals too, so a coordinator that dies finds them again when it asks again. What is
not delivered stays with the engine that holds it.
"""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_april.client import AprilClient, AprilError
from sglang_april.client.types import RolloutGroup, RolloutSummary

Event = RolloutGroup | RolloutSummary | BaseException
GONE = (404, 410)
"""Of a round: there is none, or it is not kept any longer."""


class EnginePool:
    """A client of several engines. A prompt's field `engine` says which one gets it; without it they take turns."""

    def __init__(self, clients: Sequence[AprilClient]) -> None:
        self.clients = clients
        self._open: dict[str, SharedRound] = {}

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        """A round over all engines: groups as they finish, and one summary."""
        shared = self._open[body["round_id"]] = SharedRound(self.clients, body)
        try:
            yield from shared.run()
        finally:
            if self._open.get(body["round_id"]) is shared:  # else it was asked for again meanwhile
                del self._open[body["round_id"]]

    def judge(self, round_id: str, accept: Iterable[str] = (), reject: Iterable[str] = ()) -> None:
        """Verdicts on finished groups of an open round; what is fit beyond the quota stays for the next."""
        self._find(round_id).judge(accept, reject)

    def extend(self, round_id: str, quota_add: int = 0, prompts: Iterable[Mapping[str, Any]] = ()) -> None:
        """A greater quota over all engines, and more prompts."""
        self._find(round_id).extend(quota_add, list(prompts))

    def ack(self, round_id: str) -> None:
        """No engine need keep its part of the reply any longer."""
        for client in self.clients:
            with _ignored(*GONE):
                client.ack(round_id)

    def partials(self, run: str) -> dict[str, Any]:
        """What each engine has of a run, in one list each."""
        parts = [client.partials(run) for client in self.clients]
        return {name: [row for part in parts for row in part[name]] for name in ("partials", "unstarted")}

    def drop(self, run: str, ids: Sequence[str] | None = None) -> None:
        """Delete a run, or groups of it that no sample has begun of, wherever they are."""
        for client in self.clients:
            if ids is None:
                client.drop(run)
            elif own := [row["id"] for row in client.partials(run)["unstarted"] if row["id"] in set(ids)]:
                client.drop(run, own)

    def _find(self, round_id: str) -> "SharedRound":
        if round_id not in self._open:
            raise AprilError(409, "round_id", "has ended")
        return self._open[round_id]


class SharedRound:
    """One round over several engines. Its own state is only what it would hear again from them."""

    def __init__(self, clients: Sequence[AprilClient], body: dict[str, Any]) -> None:
        self._clients, self._body, self._id = clients, body, body["round_id"]
        self._quota: int | None = body["quota"]
        self._judged = body.get("count") == "accepted"
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._home: dict[str, int] = {}
        """The engine of each group that has finished, in the order of finishing."""
        self._fit: list[str] = []
        """Groups that may be accepted, as soon as there is room."""
        self._accepted = [0] * len(clients)
        """Groups that each engine knows to be accepted."""
        self._mandatory: set[str] = set()
        """Groups that have reached the staleness bound and have not finished."""
        self._over: set[int] = set()
        """Engines whose part of the round has ended."""
        self._met = False
        self._lock = threading.RLock()

    def run(self) -> Iterator[RolloutGroup | RolloutSummary]:
        """All events, and the merged summary. An engine's error is raised; the others go on, and may be asked again."""
        streams = [client.stream(**body) for client, body in zip(self._clients, self._bodies(), strict=True)]
        if self._quota is not None:
            for engine in range(len(self._clients)):
                self._look(engine)
        for engine, stream in enumerate(streams):
            threading.Thread(target=self._follow, args=(engine, stream), daemon=True, name=f"engine {engine}").start()
        summaries: dict[int, RolloutSummary] = {}
        while len(summaries) < len(self._clients):
            engine, event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, RolloutSummary):
                summaries[engine] = event
                self._ended(engine, sum(bool(named["accepted"]) for named in event.delivered))
                continue
            self._home[event.id] = engine
            yield event
            if not self._judged and event.complete:
                self.judge([event.id], ())
        self._met = True
        yield self._merged([summaries[engine] for engine in range(len(self._clients))])

    def judge(self, accept: Iterable[str], reject: Iterable[str]) -> None:
        """Verdicts, from any thread."""
        if self._quota is None:
            return
        with self._lock:
            for prompt_id in reject:
                self._tell(prompt_id, reject=[prompt_id])
            self._fit += [prompt_id for prompt_id in accept if prompt_id not in self._fit]
            self._settle()

    def extend(self, quota_add: int, prompts: list[Mapping[str, Any]]) -> None:
        """More prompts, each for its engine, and a greater quota."""
        with self._lock:
            if self._met:
                raise AprilError(409, "round_id", "has met its quota")
            if self._quota is not None:
                self._quota += quota_add
            for engine, own in enumerate(_spread(prompts, len(self._clients))):
                if own:
                    self._extend(engine, own, quota_add)

    def _extend(self, engine: int, prompts: list[dict[str, Any]], quota_add: int) -> None:
        try:
            self._clients[engine].extend(self._id, quota_add=0, prompts=prompts)
        except AprilError as error:
            # Prompts that it has already were sent by an earlier coordinator, and counted in its quota.
            if self._quota is not None and not error.field.startswith("prompts"):
                self._quota -= quota_add
            raise

    # Before the events

    def _bodies(self) -> list[dict[str, Any]]:
        parts = _spread(self._body["prompts"], len(self._clients))
        if self._quota is None:
            return [{**self._body, "prompts": part} for part in parts]
        return [{**self._body, "prompts": part, "quota": None, "count": "accepted"} for part in parts]

    def _look(self, engine: int) -> None:
        """What an engine knows of its part of the round, which may have been open before."""
        client = self._clients[engine]
        for row in client.state()["rounds"]:
            if row["round_id"] == self._id:
                self._accepted[engine] = row["counted"]
                self._mandatory |= set(row["mandatory"])
                return
        reply = client.get_round(self._id)
        self._ended(engine, 0 if reply is None else sum(bool(group.accepted) for group in reply.finished))

    def _follow(self, engine: int, stream: Iterator[RolloutGroup | RolloutSummary]) -> None:
        try:
            for event in stream:
                self._events.put((engine, event))
        except BaseException as error:  # noqa: BLE001 - raised where the events are read
            self._events.put((engine, error))

    # Counting

    def _ended(self, engine: int, accepted: int) -> None:
        with self._lock:
            self._over.add(engine)
            self._accepted[engine] = accepted
            self._settle()

    def _settle(self) -> None:
        """Accept what there is room for, groups at the staleness bound first; at the quota, end all (S3, S4)."""
        if self._quota is None:
            return
        for prompt_id in sorted(self._fit, key=lambda prompt_id: prompt_id not in self._mandatory):
            reserved = len(self._mandatory)
            if prompt_id in self._mandatory or sum(self._accepted) + reserved < self._quota:
                self._tell(prompt_id, accept=[prompt_id])
                self._fit.remove(prompt_id)  # once it has arrived: a call that failed is made again
        if sum(self._accepted) >= self._quota and not self._mandatory and not self._met:
            for engine in set(range(len(self._clients))) - self._over:
                with _ignored(*GONE):
                    self._clients[engine].stop(self._id)
            self._met = True

    def _tell(self, prompt_id: str, **verdict: list[str]) -> None:
        """One verdict, to the engine that has the group. A part that has ended already takes none."""
        engine = self._home[prompt_id]
        if engine not in self._over:
            with _ignored(409):
                self._accepted[engine] = self._clients[engine].judge(self._id, **verdict)["accepted"]
        self._mandatory.discard(prompt_id)

    # After the events

    def _merged(self, parts: list[RolloutSummary]) -> RolloutSummary:
        versions = {part.policy_version for part in parts}
        if len(versions) > 1:
            raise AprilError(409, "policy_version", f"the engines ended the round at versions {sorted(versions)}")
        order = list(self._home)
        delivered = sorted((named for part in parts for named in part.delivered), key=lambda n: order.index(n["id"]))
        met = self._quota is not None and sum(self._accepted) >= self._quota
        return RolloutSummary(
            self._id,
            parts[0].run,
            versions.pop(),
            "quota" if met else "exhausted",
            delivered,
            _sums([part.carried for part in parts]),
            merge_stats([part.stats for part in parts]),
        )


def merge_stats(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of one round over several engines: sums; the longest duration; samples running at once, added up."""
    duration = max(part["duration_s"] for part in parts)
    running = sum(part.get("mean_running", 0.0) * part["duration_s"] for part in parts)
    changes = sorted(
        (at, running - before)
        for part in parts
        for (at, running), before in zip(part["timeline"], [0, *(x for _, x in part["timeline"])], strict=False)
    )
    timeline, now = [], 0
    for at, change in changes:
        now += change
        timeline.append([at, now])
    mean = running / duration if duration else 0.0
    return {**_sums(parts), "duration_s": duration, "mean_running": mean, "timeline": timeline}


def _sums(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of all fields that are numbers everywhere."""
    names = [name for name in parts[0] if all(isinstance(part.get(name), int | float) for part in parts)]
    return {name: sum(part[name] for part in parts) for name in names}


def _spread(prompts: Sequence[Mapping[str, Any]], engines: int) -> list[list[dict[str, Any]]]:
    """Each engine's prompts, without the field that says so."""
    parts: list[list[dict[str, Any]]] = [[] for _ in range(engines)]
    for i, prompt in enumerate(prompts):
        fields = dict(prompt)
        parts[fields.pop("engine", i % engines)].append(fields)
    return parts


@contextlib.contextmanager
def _ignored(*statuses: int) -> Iterator[None]:
    try:
        yield
    except AprilError as error:
        if error.status not in statuses:
            raise
