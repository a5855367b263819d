"""A `CrashLoop` in which one call between adapter and scheduler raises, which ends its process (`fail-stop`)."""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from sglang_april.api import messages
from sglang_april.scheduler.state import State
from tests.unit.crash_client import CrashClient, PipeMessage
from tests.unit.crash_loop import DISK, CrashLoop
from tests.unit.fault_requests import AGENTS, FaultedRequests
from tests.unit.injected_faults import Fault, InjectedError, inject
from tests.unit.leg_harness import told_of

CALLS = 60
"""Of an epoch whose fault does not come."""
FAILED, NO_FAULT = 3, 4
"""Exit statuses."""


class FaultLoop(CrashLoop):
    """Does everything that reaches one of the calls."""

    caps = MappingProxyType({"pool": 60, "host_cap": 40, "disk_cap": DISK})
    tiers = ("auto", "host", "disk", "disk", "none")

    def __init__(self, folder: Path, pipe: int, seed: int, answered: set[str]) -> None:
        super().__init__(folder, pipe, seed)
        self.engine.shares = seed % 3 == 0
        self.requests = FaultedRequests(self.engine, folder, answered, self.rng, seed)

    def publish(self, message: PipeMessage) -> None:
        """An answer to an attached request is checked first."""
        if isinstance(message, messages.LegEnded):
            self.requests.leg_ended(message)
        for request in told_of(message):
            self.requests.ended(request)
        super().publish(message)

    def spec(self, **fields: Any) -> messages.RoundSpec:
        """Half of the rounds count what their caller accepts."""
        count = self.rng.choice(("finished", "accepted")) if fields["quota_unit"] == "group" else "finished"
        after = self.rng.choice(("suspend", "continue"))
        return messages.RoundSpec(**{"count": count, "after_quota": after, **fields})

    def live_with_fault(self) -> None:
        self.name_the_version()
        for _ in range(CALLS):
            self.turn()
            self.requests.ask()
            self.engine.controller.has_work()
            self.rng.choice(self.disturbances())()

    def finish(self) -> None:
        """Everything that was asked is answered, too, and trajectories are delivered."""
        self.name_the_version()
        self.requests.ask_all()
        while self.requests.pending:
            if AGENTS not in self.open_runs():  # the last round may have ended at its quota
                self.round_of_trajectories()
            self.engine.step()
        known = self.context.trajectories.get(AGENTS)
        if known is not None:
            open_ones = [name for name, trajectory in known.active.items() if not trajectory.done]
            self.issue(messages.EndTrajectories, run=AGENTS, done=dict.fromkeys(open_ones, b"{}"), reject=[])
        while known is not None and known.active:  # one round delivers at most its quota
            self.round_of_trajectories()
            self.engine.step()
        super().finish()
        assert not self.requests.pending

    def disturbances(self) -> list[Callable[[], Any]]:
        return [
            self.disturb,
            self.pause,
            self.get_replies,
            self.judge_all,
            self.extend_one,
            self.foreign,
            self.retract,
            self.abort_one,
            self.observe_rates,
            lambda: self.engine.weight_call(ok=True, whole=True, flush=False),
            lambda: self.engine.controller.abort_everything(),
            self.release,
            self.requests.abort,
            self.push_beside_requests,
            self.weight_session,
            self.round_of_trajectories,
            self.end_trajectories,
        ]

    def open_runs(self) -> set[str]:
        return {r.spec.run for r in self.context.rounds.values()}

    def push_beside_requests(self) -> None:
        """Requests that arrive while a push is open wait for its end."""
        self.issue(messages.PushBegin)
        self.requests.ask()
        self.engine.step()
        self.issue(messages.PushEnd)

    def weight_session(self) -> None:
        """A weight update between SGLang's own calls that begin and end it."""
        self.engine.controller.session_begun()
        self.engine.weight_call(ok=True, whole=False, flush=False)
        self.engine.step()
        self.engine.controller.session_ended()

    def round_of_trajectories(self) -> None:
        """Begin one, or stop it."""
        rnd = next((r for r in self.context.rounds.values() if r.spec.run == AGENTS), None)
        if rnd is not None:
            self.issue(messages.StopRound, round_id=rnd.spec.round_id)
            return
        self.delete_replies(AGENTS)
        name = f"{AGENTS}.{self.seed}.{self.seq}"
        spec = messages.RoundSpec(name, AGENTS, 2, "trajectory", "keep", 5, trajectories=True)
        self.issue(messages.OpenRound, spec=spec, prompts=[], params=[])

    def end_trajectories(self) -> None:
        """Some are done or rejected, or all are dropped."""
        run = self.context.trajectories.get(AGENTS)
        if run is None or not run.active:
            return
        if self.rng.random() < 0.2:
            self.issue(messages.Drop, run=AGENTS, ids=None)
            return
        name = [self.rng.choice(list(run.active))]
        done, reject = (name, []) if self.rng.random() < 0.7 else ([], name)
        self.issue(messages.EndTrajectories, run=AGENTS, done=dict.fromkeys(done, b""), reject=reject)

    def pause(self) -> None:
        self.engine.controller.freeze()
        self.engine.step()
        self.engine.controller.thaw()

    def get_replies(self) -> None:
        self.issue(messages.GetState)
        self.issue(messages.GetState, check=True)
        self.issue(messages.GetPartials)

    def judge_all(self) -> None:
        for rnd in self.context.rounds.values():
            ripe = [g.id for g in rnd.run.groups.values() if g.whole and g.accepted is None]
            if rnd.judged and ripe:
                self.issue(messages.JudgeRound, round_id=rnd.spec.round_id, accept=ripe[:1], reject=ripe[1:])
                return

    def extend_one(self) -> None:
        if self.context.rounds:
            rnd = self.rng.choice(list(self.context.rounds.values()))
            given = [messages.Prompt(f"{self.seed}.{self.seq}.9", bytes(12), 2, 0, 9)]
            size = [msgspec.msgpack.encode(6)]
            self.issue(messages.ExtendRound, round_id=rnd.spec.round_id, quota_add=0, prompts=given, params=size)

    def foreign(self) -> None:
        """Stock requests, which take memory as they grow."""
        for _ in range(2):
            self.engine.add_foreign_request(f"foreign-{self.seq}", self.rng.randrange(1 << 30), 2, 30)

    def retract(self) -> None:
        self.engine.retract_next = True
        self.engine.step()

    def abort_one(self) -> None:
        """SGLang gives a waiting sample up."""
        waiting = [r for r in self.engine.waiting if r.sample is not None and r.sample.state is State.RUNNING]
        if waiting:
            self.engine.abort_waiting(waiting[0])

    def observe_rates(self) -> None:
        self.engine.controller.observe(messages.Rates(1e-3, 0.0, {"host": (1e-6, 1e-6), "disk": (1e-6, 1e-6)}))

    def release(self) -> None:
        if self.engine.release_memory():
            if lost := self.rng.random() < 0.5:
                self.engine.controller.weights_lost()
            self.engine.step()
            self.engine.released = []
            if lost:
                self.engine.step()
                self.engine.weight_call(ok=True, whole=True, flush=False)


class FaultClient(CrashClient):
    """Knows that a round may end before a verdict or a prompt reaches it, what was answered of attached requests, and
    the records of trajectories.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: set[str] = set()
        """The `rid`s of answered ones."""
        self.legs: dict[str, dict[int, bytes]] = {}
        """By trajectory and number, those that have been announced of undelivered trajectories."""
        self.left: set[str] = set()
        """Trajectories that were delivered, rejected or dropped."""
        self.unanswered: set[str] = set()
        """Those of them whose removal has no answer yet: it may not be in the journal."""

    def observe(self, message: PipeMessage) -> None:
        for request in told_of(message):
            assert request.rid not in self.requests, f"{request.rid} is answered twice"
            self.requests.add(request.rid)
        match message:
            case messages.AttachedEnded():
                pass
            case messages.LegEnded():
                assert message.trajectory not in self.left, message
                legs = self.legs.setdefault(message.trajectory, {})
                assert message.number not in legs
                legs[message.number] = messages.encode(message)
            case messages.TrajectoriesRemoved():
                self._leave(message.ids)
                self.unanswered.update(message.ids)
            case _:
                super().observe(message)

    def _leave(self, names: Iterable[str]) -> None:
        for name in names:
            self.left.add(name)
            self.legs.pop(name, None)

    def _replied(self, ended: messages.RoundEnded, samples: list[messages.FinishedSample]) -> None:
        super()._replied(ended, samples)
        assert not self.left & set(ended.trajectories), "a trajectory is delivered twice"
        self._leave(ended.trajectories)

    def _answered(self, answer: messages.Answer) -> None:
        command = self.issued.get(answer.seq)
        if isinstance(command, messages.Drop | messages.EndTrajectories):
            self.unanswered.clear()
        ended = messages.JudgeRound | messages.ExtendRound | messages.EndTrajectories
        if answer.status == 409 and isinstance(command, ended):
            del self.issued[answer.seq]
            return
        super()._answered(answer)
        if isinstance(command, messages.ExtendRound):
            run = command.round_id.split(".")[0]
            self.accepted |= {(run, p.id): p.n for p in command.prompts}

    def _restored(self, epoch: messages.Restored) -> None:
        there = {(run, prompt.id) for run, prompt in epoch.groups}
        for command in self.issued.values():
            if isinstance(command, messages.ExtendRound):
                run = command.round_id.split(".")[0]
                self.accepted |= {(run, p.id): p.n for p in command.prompts if (run, p.id) in there}
        unanswered = list(self.issued.values())
        super()._restored(epoch)
        restored = {t.id: {leg.number: messages.encode(leg) for leg in t.legs} for t in epoch.trajectories}
        for command in unanswered:
            if isinstance(command, messages.Drop) and command.run == AGENTS:
                self._leave(self.legs.keys() - restored.keys())
            elif isinstance(command, messages.EndTrajectories):
                self._leave((self.legs.keys() & command.reject) - restored.keys())
        self.left -= self.unanswered
        self.unanswered.clear()
        assert not self.left & restored.keys(), "a trajectory came back"
        for name, legs in self.legs.items():
            assert legs.items() <= restored.get(name, {}).items(), f"trajectory {name} has lost a leg"
        for reply in epoch.replies:
            assert [t.id for t in reply.trajectories] == reply.ended.trajectories
        self.legs |= restored


def failing_epoch(folder: Path, pipe: int, seed: int, fault: Fault, answered: set[str]) -> None:
    """In a forked process: live until the fault, and end as a scheduler process does."""

    def thread_ended(failed: threading.ExceptHookArgs) -> None:
        if isinstance(failed.exc_value, InjectedError):
            os._exit(FAILED)
        threading.__excepthook__(failed)
        os._exit(1)

    threading.excepthook = thread_ended
    inject(fault)
    try:
        FaultLoop(folder, pipe, seed, answered).live_with_fault()
    except InjectedError:
        os._exit(FAILED)
    os._exit(NO_FAULT)
