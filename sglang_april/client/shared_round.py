"""A round of several engines: one quota over all of them, which this client counts."""

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sglang_april.client.calls import AprilError
from sglang_april.client.client import AprilClient
from sglang_april.client.follow import follow
from sglang_april.client.merged_stats import merge_stats, sum_fields
from sglang_april.client.types import RolloutGroup, RolloutSummary

Event = RolloutGroup | RolloutSummary | BaseException
NOT_FOUND = (404, 410)
"""Status codes for a round that does not exist or is no longer kept."""
POLL_S = 0.1


class SharedRound:
    """One round over several engines. All of its state can be rebuilt from the engines."""

    def __init__(self, clients: Sequence[AprilClient], body: dict[str, Any]) -> None:
        self._clients, self._body, self.id = clients, body, body["round_id"]
        self._quota: int | None = body["quota"]
        self._caller_judges = body.get("count") == "accepted"
        self._previews = body.get("previews", False) or self._caller_judges
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._engine_of: dict[str, int] = {}
        """Engine of each finished group, in finish order."""
        self._acceptable: list[str] = []
        """Groups with a positive verdict that has not been sent, because the quota may be full."""
        self._accepted = [0] * len(clients)
        """Number of accepted groups at each engine."""
        self._mandatory: dict[str, int] = {}
        """Unfinished groups that have reached the staleness bound, with their engines."""
        self._ended: set[int] = set()
        """Engines at which the round has ended."""
        self.sent: dict[str, int] = {}
        """Engine of each prompt of an extension. It may have refused the prompt, or its reply may be lost."""
        self._quota_met = self._closed = False
        self._lock = threading.RLock()

    def run(self) -> Iterator[RolloutGroup | RolloutSummary]:
        """All events, then the merged summary. The error of an engine is raised; the round can then be repeated.

        Raises:
            AprilError: 409 if the engines have different versions; no engine has opened the round.
        """
        versions = {client.state()["policy_version"] for client in self._clients}
        if len(versions) > 1:
            raise AprilError(
                409, "policy_version", f"the engines are at versions {sorted(versions)}; push to all of them"
            )
        streams: list[Iterator[RolloutGroup | RolloutSummary]] = []
        try:
            for client, body in zip(self._clients, self._bodies(), strict=True):
                streams.append(client.stream(**body))
            if self._quota is not None:
                for engine in range(len(self._clients)):
                    self._read_state(engine)
        finally:  # also if an engine refuses: an unread stream holds its connection
            for engine, stream in enumerate(streams):
                follow(stream, partial(self._put, engine), f"engine {engine}")
        summaries: dict[int, RolloutSummary] = {}
        while len(summaries) < len(self._clients):
            engine, event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, RolloutSummary):
                summaries[engine] = event
                self._mark_ended(engine, sum(bool(group["accepted"]) for group in event.delivered))
                continue
            self._engine_of[event.id] = engine
            if self._previews:
                yield event
            if not self._caller_judges and event.complete:
                self.judge([event.id], ())
        self._quota_met = True
        merged = self._merge([summaries[engine] for engine in range(len(self._clients))])
        if not self._previews:
            yield from merged.groups
        yield merged

    def close(self) -> None:
        """End `run`, from any thread: from now on, no call begins that changes the round. It can be repeated."""
        self._closed = True  # without the lock, for which verdicts may wait that a dead engine holds up one by one
        self._events.put((0, GeneratorExit()))  # `run` raises it

    def wait_closed(self) -> None:
        """Wait for the call in flight."""
        with self._lock:
            pass

    def judge(self, accept: Iterable[str], reject: Iterable[str]) -> None:
        """Take verdicts, from any thread."""
        if self._quota is None:
            self._forward(accept, reject)
            return
        accept, reject = list(accept), list(reject)
        with self._lock:
            self._check_known(accept=accept, reject=reject)
            for prompt_id in reject:
                self._send_verdict(prompt_id, reject=[prompt_id])
            self._acceptable += [prompt_id for prompt_id in accept if prompt_id not in self._acceptable]
            self._accept_up_to_quota()

    def _forward(self, accept: Iterable[str], reject: Iterable[str]) -> None:
        """Without a quota every verdict is for the engines, which wait for it if the caller judges."""
        if not self._caller_judges:
            return
        accept, reject = list(accept), list(reject)
        with self._lock:
            self._check_known(accept=accept, reject=reject)
            for prompt_id in accept:
                self._send_verdict(prompt_id, accept=[prompt_id])
            for prompt_id in reject:
                self._send_verdict(prompt_id, reject=[prompt_id])

    def _check_known(self, **verdicts: list[str]) -> None:
        for field, ids in verdicts.items():
            if unknown := [prompt_id for prompt_id in ids if prompt_id not in self._engine_of]:
                raise AprilError(404, field, f"{unknown} have not finished in this round")

    def pushed(self) -> None:
        """A push has moved the version: more groups may have become mandatory."""
        with self._lock:
            for engine in set(range(len(self._clients))) - self._ended:
                rows = self._clients[engine].state()["rounds"]
                for row in (row for row in rows if row["round_id"] == self.id):
                    self._mandatory |= dict.fromkeys(row["mandatory"], engine)

    def extend(self, quota_add: int, prompts: list[Mapping[str, Any]]) -> None:
        """As `EnginePool.extend`."""
        with self._lock:
            if self._quota_met:
                raise AprilError(409, "round_id", "has met its quota")
            if self._quota is not None:
                self._quota += quota_add
            errors = self._send(prompts)
            # A refused prompt id means that an earlier attempt sent the prompt, so the raised quota is right.
            failed = [error for error in errors if error.status != 409 or not error.field.startswith("prompts")]
            if failed and self._quota is not None:
                self._quota -= quota_add
            if errors:
                raise (failed or errors)[0]

    def _send(self, prompts: list[Mapping[str, Any]]) -> list[AprilError]:
        """Send each prompt to an engine at which the round is open. Returns the errors."""
        errors: list[AprilError] = []
        while prompts:
            finished = [prompt["id"] for prompt in prompts if self._engine_of.get(prompt["id"]) in self._ended]
            if finished:  # an earlier attempt sent them
                errors.append(AprilError(409, "prompts", f"{finished} have finished in this round"))
            engines = [engine for engine in range(len(self._clients)) if engine not in self._ended]
            if not engines:
                return [*errors, AprilError(409, "round_id", "has ended at all engines")]
            left = [prompt for prompt in prompts if prompt["id"] not in finished]
            shares, prompts = _spread(left, engines, self.sent), []
            for engine, share in shares.items():
                if self._closed:
                    return [*errors, AprilError(409, "round_id", "has ended")]
                self.sent |= {prompt["id"]: engine for prompt in share}
                try:
                    if share:
                        self._clients[engine].extend(self.id, quota_add=0, prompts=share)
                except AprilError as error:  # go on: an earlier attempt may have failed at a later engine
                    if (error.status, error.field) == (409, "round_id"):
                        self._ended.add(engine)
                        prompts += share
                    else:
                        errors.append(error)
        return errors

    # Start of the round

    def _bodies(self) -> list[dict[str, Any]]:
        """The request for each engine."""
        shares = _spread(self._body["prompts"], range(len(self._clients)), {}).values()
        counted = {} if self._quota is None else {"quota": None, "count": "accepted"}
        return [{**self._body, "prompts": share, "previews": True, **counted} for share in shares]

    def _read_state(self, engine: int) -> None:
        """Read the accepted and mandatory groups of an engine, where this round may have been open before."""
        client = self._clients[engine]
        while not self._closed:
            for row in client.state()["rounds"]:
                if row["round_id"] == self.id:
                    self._accepted[engine] = row["counted"]
                    self._mandatory |= dict.fromkeys(row["mandatory"], engine)
                    # An earlier attempt may have sent an extension here although its prompts name another engine.
                    self.sent |= dict.fromkeys((one["id"] for one in client.partials(row["run"])["groups"]), engine)
                    return
            if (reply := client.get_round(self.id)) is not None:
                self._engine_of |= {group.id: engine for group in reply.finished}
                self._mark_ended(engine, sum(bool(group.accepted) for group in reply.finished))
                return
            time.sleep(POLL_S)  # it has ended, and its reply waits for the journal

    def _put(self, engine: int, event: Event) -> None:
        self._events.put((engine, event))

    # Counting

    def _mark_ended(self, engine: int, accepted: int) -> None:
        with self._lock:
            self._ended.add(engine)
            self._accepted[engine] = accepted
            self._mandatory = {name: other for name, other in self._mandatory.items() if other != engine}
            self._accept_up_to_quota()

    def _accept_up_to_quota(self) -> None:
        """Accept groups while the quota has capacity, mandatory ones first; at the quota, stop all engines.

        (`quota-exact`, `staleness-bound`)
        """
        if self._quota is None:
            return
        for prompt_id in sorted(self._acceptable, key=lambda prompt_id: prompt_id not in self._mandatory):
            reserved = len(self._mandatory)
            if prompt_id in self._mandatory or sum(self._accepted) + reserved < self._quota:
                self._send_verdict(prompt_id, accept=[prompt_id])
                self._acceptable.remove(prompt_id)  # only after success: a failed call is repeated
        if sum(self._accepted) >= self._quota and not self._mandatory and not self._quota_met:
            for engine in set(range(len(self._clients))) - self._ended:
                if self._closed:
                    return
                with ignoring(*NOT_FOUND):
                    self._clients[engine].stop(self.id)
            self._quota_met = True

    def _send_verdict(self, prompt_id: str, **verdict: list[str]) -> None:
        """Send a verdict to the engine of the group, unless the round has ended there, or is closed."""
        if self._closed:
            return
        engine = self._engine_of[prompt_id]
        if engine not in self._ended:
            with ignoring(409):
                self._accepted[engine] = self._clients[engine].judge(self.id, **verdict)["accepted"]
        self._mandatory.pop(prompt_id, None)

    # End of the round

    def _merge(self, summaries: list[RolloutSummary]) -> RolloutSummary:
        rank = {prompt_id: place for place, prompt_id in enumerate(self._engine_of)}
        delivered = [group for summary in summaries for group in summary.delivered]
        groups = [group for summary in summaries for group in summary.groups]
        met = self._quota is not None and sum(self._accepted) >= self._quota
        return RolloutSummary(
            self.id,
            summaries[0].run,
            max(summary.policy_version for summary in summaries),  # a push may come between the ends at two engines
            "quota" if met else "exhausted",
            sorted(delivered, key=lambda group: rank[group["id"]]),
            sum_fields([summary.carried for summary in summaries]),
            merge_stats([summary.stats for summary in summaries]),
            sorted(groups, key=lambda group: rank[group.id]),
        )


def _spread(
    prompts: Sequence[Mapping[str, Any]], engines: Sequence[int], sent: Mapping[str, int]
) -> dict[int, list[dict[str, Any]]]:
    """The prompts of each engine, without the field `engine`. A prompt that was sent before has its engine from `sent`.

    Prompts without an engine, or whose engine is not among `engines`, go to the one to which the fewest were sent.
    """
    shares: dict[int, list[dict[str, Any]]] = {engine: [] for engine in engines}
    load = Counter(sent.values())
    for prompt in prompts:
        fields = dict(prompt)
        engine = sent.get(fields["id"], fields.pop("engine", None))
        if engine not in shares:
            engine = min(engines, key=lambda one: load[one])
        load[engine] += 1
        shares[engine].append(fields)
    return shares


@contextlib.contextmanager
def ignoring(*statuses: int) -> Iterator[None]:
    """Suppress errors with these status codes."""
    try:
        yield
    except AprilError as error:
        if error.status not in statuses:
            raise
