"""Several engines behind the interface of one client: prompts are spread over them, and one quota counts over all.

A round is opened on every engine with `quota: null` and `count: accepted`. Finished groups are accepted at their engine
until the quota is met; then all engines are stopped and deliver what was accepted (`quota-exact`). The engines keep the
verdicts, in their journals too, so a restarted trainer that repeats the round reads them back. Undelivered prompts stay
at their engine.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_april.client.calls import AprilError, push_stays_open, with_round_id
from sglang_april.client.client import AprilClient
from sglang_april.client.shared_round import NOT_FOUND, SharedRound, ignoring
from sglang_april.client.types import RolloutGroup, RolloutSummary


class EnginePool:
    """A client of several engines. The field `engine` of a prompt selects its engine; the default is round-robin."""

    def __init__(self, clients: Sequence[AprilClient]) -> None:
        self.clients = clients
        self.moved: dict[str, int] = {}
        """Engine of each prompt that an extension has sent to another engine than the prompt names."""
        self._open: dict[str, SharedRound] = {}

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        """`AprilClient.stream` over all engines: with previews, groups as they finish; at the end one summary.

        Raises:
            AprilError: an engine refused the round, or was lost (`ServerLostError`); groups stay at their engines.
        """
        yield from self.run(SharedRound(self.clients, with_round_id(body)))

    def run(self, shared: SharedRound) -> Iterator[RolloutGroup | RolloutSummary]:
        """The events of a round, which takes verdicts and extensions meanwhile."""
        self._open[shared.id] = shared
        try:
            yield from shared.run()
        finally:
            if self._open.get(shared.id) is shared:  # otherwise the round has been repeated meanwhile
                del self._open[shared.id]

    def judge(self, round_id: str, accept: Iterable[str] = (), reject: Iterable[str] = ()) -> None:
        """Verdicts on finished groups of an open round. Groups beyond the quota wait for the next round."""
        self._find(round_id).judge(accept, reject)

    def extend(self, round_id: str, quota_add: int = 0, prompts: Iterable[Mapping[str, Any]] = ()) -> None:
        """Raise the quota over all engines, and add prompts.

        The round ends at an engine that has nothing left to finish or judge; its prompts then go to the other engines.

        Raises:
            AprilError: 409 `round_id` if the quota has been met or the round has ended at all engines; or a refusal.
        """
        shared, prompts = self._find(round_id), list(prompts)
        try:
            shared.extend(quota_add, prompts)
        finally:
            for prompt in prompts:
                engine = shared.sent.get(prompt["id"])
                self.moved.pop(prompt["id"], None)
                if engine is not None and engine != prompt.get("engine", engine):
                    self.moved[prompt["id"]] = engine

    def ack(self, round_id: str) -> None:
        """Acknowledge the replies of all engines to a round."""
        for client in self.clients:
            with ignoring(*NOT_FOUND):
                client.ack(round_id)

    def partials(self, run: str) -> dict[str, Any]:
        """`GET /april/partials` of a run, of all engines."""
        replies = [client.partials(run) for client in self.clients]
        return {name: [row for reply in replies for row in reply[name]] for name in replies[0]}

    def drop(self, run: str, ids: Sequence[str] | None = None) -> None:
        """Delete a run, or these unstarted groups of it, on every engine."""
        named = set(ids or ())
        for client in self.clients:
            if ids is None:
                client.drop(run)
            elif at_engine := [row["id"] for row in client.partials(run)["unstarted"] if row["id"] in named]:
                client.drop(run, at_engine)

    @contextlib.contextmanager
    def push(self, version: int | None = None) -> Iterator[None]:
        """One push to all engines around SGLang's weight calls, after which they have one version: `version`, or one
        more than the highest. An engine that was restarted, and is at a lower version, has it too.

        If the body fails, the push stays open at every engine: the weights are mixed. If it cannot begin at one engine,
        it stays open at those before.
        """
        target = 1 + max(client.state()["policy_version"] for client in self.clients) if version is None else version
        first, *others = self.clients
        first.push_begin(target)
        with push_stays_open():
            for client in others:
                client.push_begin(target)
            yield
        for client in self.clients:
            client.push_end(target)
        for shared in list(self._open.values()):
            shared.pushed()

    def _find(self, round_id: str) -> SharedRound:
        if round_id not in self._open:
            raise AprilError(409, "round_id", "has ended")
        return self._open[round_id]
