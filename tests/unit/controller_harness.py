"""Controllers on the fake engine, checked against the independent `ReferenceModel`.

`ControllerHarness` sends the same events to one or more replicas, which must decide and answer alike
(`rank-determinism`), and recounts everything after each event.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from sglang_april.api import messages
from sglang_april.scheduler import report
from sglang_april.scheduler.state import Sample
from tests.unit.event_checks import EventChecks
from tests.unit.fake_engine import FakeEngine
from tests.unit.recount import recount
from tests.unit.reference_model import Key, ModelGroup, ModelRound


def ids(reply: messages.RoundEnded) -> list[str]:
    return [d.id for d in reply.deliver]


def lengths(*sizes: int) -> dict[str, tuple[int, int, int]]:
    """Prompts p0, p1, … with one sample of exactly that length each."""
    return {f"p{i}": (3, 1, -size) for i, size in enumerate(sizes)}


def given_as(prompts: dict[str, tuple[int, int, int]]) -> tuple[list[messages.Prompt], list[bytes]]:
    """The prompts as messages, and their shared parameters."""
    sizes = sorted({size for _, _, size in prompts.values()})
    given = [messages.Prompt(i, bytes(4 * m), n, sizes.index(size), 0) for i, (m, n, size) in prompts.items()]
    return given, list(map(msgspec.msgpack.encode, sizes))


Build = Callable[..., "ControllerHarness"]


class ControllerHarness(EventChecks):
    def __init__(self, replicas: int = 1, every: int = 1, **engine: Any) -> None:
        """`every`: recount after so many events."""
        super().__init__()
        self.every, self.events = every, 0
        self.replicas, self.kind = replicas, engine
        self._start()
        self.seq, self.push_open, self.frozen = 0, False, False
        self._then: Callable[[messages.Answer], None] = lambda answer: None
        self.answers: dict[int, messages.Answer] = {}
        self.replies: list[messages.RoundEnded] = []
        self.samples: dict[tuple[Key, int], messages.FinishedSample] = {}
        """Results of all finished samples."""

    def _start(self) -> None:
        self.engines = [FakeEngine(**self.kind) for _ in range(self.replicas)]
        self.engine = self.engines[0]
        self.controller = self.engine.controller
        self.ledger = self.controller.context.ledger
        self.sent: list[list[bytes]] = [[] for _ in self.engines]
        for i, e in enumerate(self.engines):
            e.on_event = lambda event, i=i: self._receive(i, event)
        self.engine.on_forward, self.engine.on_results = self._forward, self._results
        self.engine.on_retract = self._retract

    # --- events

    def command(
        self, kind: type[messages.Command], then: Callable[[messages.Answer], None] = lambda answer: None, **fields: Any
    ) -> messages.Answer:
        """Send a command; `then` updates the model when a 200 is answered."""
        self.seq += 1
        self._then = then
        data = messages.encode(kind(seq=self.seq, **fields))
        for e in self.engines:
            e.controller.command(messages.decode_message(data))
        if kind is not messages.GetState:
            self.check()
        return self.answers.pop(self.seq)

    def end_due_rounds(self) -> None:
        """Every command ends rounds that are over; this one does nothing else."""
        self.command(messages.GetState, brief=True)

    def do(self, act: Callable[[FakeEngine], Any]) -> Any:
        """Apply an engine event to every replica."""
        results = [act(e) for e in self.engines]
        self._version_moved()
        self.check()
        return results[0]

    def _version_moved(self) -> None:
        now = self.controller.context.clock.version
        assert now >= self.version
        if now > self.version:
            self.version = now
            for rnd in self.rounds.values():
                self.mark(rnd)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.do(FakeEngine.step)

    def open(self, run: str, prompts: dict[str, tuple[int, int, int]], **spec: Any) -> messages.Answer:
        """Open a round; `prompts`: id -> (prompt length, n, max_new_tokens, or minus the exact length)."""
        given, params = given_as(prompts)
        fields = {"quota": 1, "quota_unit": "group", "kv": "keep", "max_staleness": 5, **spec}
        fields |= {"round_id": f"r{self.seq}", "run": run}
        self.end_due_rounds()
        begun = sum(g.begun for g in self.ledger.runs[run].groups.values()) if run in self.ledger.runs else 0
        closed = self.controller.context.closed()
        taken = run in self.rounds or any(g.key[1] in prompts for g in self.of(run))
        rnd = ModelRound(messages.RoundSpec(**fields), begun)
        answer = self.command(
            messages.OpenRound,
            lambda a: self._opened(rnd, given, a.data["incarnations"]),
            spec=messages.RoundSpec(**fields),
            prompts=given,
            params=params,
        )
        assert answer.status == (503 if closed else 409 if taken else 200), answer
        return answer

    def _opened(self, rnd: ModelRound, prompts: list[messages.Prompt], incarnations: list[int]) -> None:
        run = rnd.spec.run
        self._accepted(run, prompts, incarnations)
        self.opened[run] += 1
        rnd.number = self.opened[run]
        self.rounds[run] = rnd
        if ahead := self.ahead.pop(run, None):
            rnd.before = (ahead.generated, ahead.reprefilled)
        self.mark(rnd)

    def _accepted(self, run: str, prompts: list[messages.Prompt], incarnations: list[int]) -> None:
        for prompt, incarnation in zip(prompts, incarnations, strict=True):
            assert incarnation == self.incarnations[run, prompt.id]
            self.incarnations[run, prompt.id] += 1
            key = (run, prompt.id, incarnation)
            self.groups[key] = ModelGroup(key, set(range(prompt.n)))
            self.fate |= {(key, i): "live" for i in range(prompt.n)}

    def stop(self, run: str, deliver: list[str] | None = None) -> None:
        self.end_due_rounds()
        if run in self.rounds:
            rnd = self.rounds[run]
            rnd.stop = messages.StopRound(0, rnd.spec.round_id, deliver)
            assert self.command(messages.StopRound, round_id=rnd.spec.round_id, deliver=deliver).data["open"]
            assert run not in self.rounds

    def judge(self, run: str, verdicts: dict[str, bool]) -> int:
        """Send verdicts by prompt id: all are recorded or none, and repeating them changes nothing."""
        self.end_due_rounds()
        rnd = self.rounds.get(run)
        groups = {g.key[1]: g for g in self.of(run)}
        wrong = [404 if i not in groups else 409 for i in verdicts if i not in groups or not groups[i].whole]
        wrong += [409 for i, v in verdicts.items() if i in groups and groups[i].accepted is (not v)]
        refused = rnd is None or rnd.spec.count == "finished"
        accept, reject = [i for i, v in verdicts.items() if v], [i for i, v in verdicts.items() if not v]
        answer = self.command(
            messages.JudgeRound,
            lambda _: [setattr(groups[i], "accepted", v) for i, v in verdicts.items()],
            round_id=rnd.spec.round_id if rnd else "none",
            accept=accept,
            reject=reject,
        )
        assert answer.status in ([409] if refused else wrong or [200])
        if answer.status == 200:
            taken = [g.accepted for g in groups.values()]
            assert answer.data == {"accepted": taken.count(True), "rejected": taken.count(False)}
        return answer.status

    def extend(self, run: str, quota_add: int, prompts: dict[str, tuple[int, int, int]], key: str | None = None) -> int:
        self.end_due_rounds()
        rnd = self.rounds.get(run)
        taken = rnd is None or (quota_add and rnd.spec.quota is None) or any(g.key[1] in prompts for g in self.of(run))
        given, params = given_as(prompts)
        answer = self.command(
            messages.ExtendRound,
            lambda a: self._extended(rnd, quota_add, given, a.data["incarnations"]),
            round_id=rnd.spec.round_id if rnd else "none",
            quota_add=quota_add,
            prompts=given,
            params=params,
            idempotency_key=key,
            fingerprint=f"digest of {key}",
        )
        assert answer.status == (409 if taken else 200)
        if key is not None and answer.status == 200:
            rnd.spec.extensions[key] = messages.Extension(f"digest of {key}", answer.data)
        return answer.status

    def _extended(
        self, rnd: ModelRound, quota_add: int, prompts: list[messages.Prompt], incarnations: list[int]
    ) -> None:
        if rnd.spec.quota is not None:
            rnd.spec.quota += quota_add
        self._accepted(rnd.spec.run, prompts, incarnations)

    def drop(self, run: str, ids: list[str] | None = None) -> None:
        self.command(messages.Drop, lambda answer: self._dropped(answer, run, ids), run=run, ids=ids)

    def _dropped(self, answer: messages.Answer, run: str, ids: list[str] | None) -> None:
        doomed = [g for g in self.of(run) if ids is None or g.key[1] in ids]
        assert sorted(answer.data["groups"]) == sorted([g.key[1], g.key[2]] for g in doomed)
        assert answer.data["samples"] == sum(len(g.undelivered) for g in doomed)
        for group in doomed:
            for index in group.undelivered:
                self.leave(group.key, index, "dropped")
            del self.groups[group.key]
        if not any(self.of(run)):
            self.ahead.pop(run, None)

    def push_begin(self, version: int | None = None) -> int:
        status = self.command(messages.PushBegin, version=version).status
        lowest = self.version + (not self.engine.controller.context.clock.without_weights)
        assert status == (200 if version is None or version >= lowest else 409)
        self.push_open |= status == 200
        return status

    def push_end(self, version: int | None = None) -> int:
        status = self.command(messages.PushEnd, lambda _: self._version_moved(), version=version).status
        assert status == 409 or self.push_open
        self.push_open &= status != 200
        return status

    def freeze(self, frozen: bool) -> None:
        self.command(messages.Freeze if frozen else messages.Thaw)
        self.frozen = frozen

    def drain(self, limit: int = 3000) -> None:
        """Finish everything that was accepted; no state may prevent it, and nothing may be left behind."""
        self.freeze(False)
        self.do(lambda e: setattr(e, "released", []))
        if self.controller.context.clock.closed:
            assert self.push_begin() == 200
            assert self.push_end() == 200
        for run in sorted({k[0] for k in self.groups} - set(self.rounds)):
            assert self.open(run, {}, quota=None).status == 200
        for _ in range(limit):
            if not self.rounds and self.engine.fully_idle():
                break
            for run in [r for r, k in self.rounds.items() if (k.spec.quota, k.spec.count) != (None, "finished")]:
                self.stop(run)
                if any(self.of(run)):
                    assert self.open(run, {}, quota=None).status == 200
            self.step()
        assert not self.rounds, f"a deadlock: {report.state(self.controller.context)}"
        assert not self.groups
        assert "live" not in self.fate.values()
        assert not any(self.ledger.census().values())
        assert sorted(self.engine.free) == list(range(self.engine.pool))

    @staticmethod
    def _same(sent: list[bytes], other: list[bytes]) -> bool:
        return sent == other

    def sample(self, run: str, name: str, index: int = 0) -> Sample:
        return self.ledger.runs[run].groups[name].samples[index]

    def drawn(self, run: str, name: str) -> int:
        """Output tokens of a running sample, of which the ledger has not counted all."""
        return self.engine.output_length(self.sample(run, name))

    def reply(self, run: str = "run") -> messages.RoundEnded:
        """Step until the run's open round has ended; returns its reply."""
        for _ in range(1000):
            if run not in self.rounds:
                break
            self.step()
        return next(r for r in reversed(self.replies) if r.run == run)

    def check(self) -> None:
        self.events += 1
        if self.events % self.every:
            return
        assert self.controller.context.rounds.keys() == self.rounds.keys()
        there = {(r.name, g.id, g.incarnation): g for r in self.ledger.runs.values() for g in r.groups.values()}
        assert there.keys() == self.groups.keys()
        assert all(there[key].samples.keys() == known.undelivered for key, known in self.groups.items())
        recount(self.engine, self.ledger)
        assert self.engine.tokens_for_next_decode() <= self.engine.most_for_next_decode()
        pool = report.state(self.controller.context)["pool"]
        assert pool.pop("total") == sum(pool.values())
        assert all(self._same(sent, self.sent[0]) for sent in self.sent)
        decided = [e.controller.context.decisions.end_step(self.events) for e in self.engines]
        assert all(d == decided[0] for d in decided)
        for sent in self.sent:
            sent.clear()


def spans(w: ControllerHarness, name: str) -> list[tuple[int, str]]:
    """(version, provenance) of each span of a prompt's first sample in the run "run"."""
    return [(s.version, s.kv) for s in w.samples[("run", name, 0), 0].spans]
