"""A `CrashLoop` in which one call between adapter and scheduler raises, which ends its process (`fail-stop`).

The calls are the methods of the `Engine` protocol in one direction, those of the `Controller` in the other, and those
of the recorder. They are read from the code, so a new method is covered without a change here.
"""

import inspect
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from sglang_april.api import messages
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.engine import Engine
from sglang_april.scheduler.recorder import Recorder
from sglang_april.scheduler.state import State
from tests.unit.crash_client import CrashClient
from tests.unit.crash_loop import DISK, CrashLoop
from tests.unit.storing_engine import StoringEngine

CLASSES: dict[str, tuple[type, type]] = {
    "engine": (Engine, StoringEngine),
    "controller": (Controller, Controller),
    "recorder": (Recorder, Recorder),
}
"""Where a call belongs: the class that declares its methods, and the one whose methods fail."""
UNUSED = {
    "recorder.close": "only tests call it",
    "engine.rebuild_request": "the engine in memory has requests for all samples once it is restored",
    "engine.answer_aborted": "the crash loop has no attached requests",
    "engine.answered": "the crash loop has no attached requests",
    "recorder.asked_again": "the crash loop has no attached requests",
    "recorder.attached_ended": "the crash loop has no attached requests",
}
CALLS = 60
"""Of an epoch whose fault does not come."""
FAILED, NO_FAULT = 3, 4
"""Exit statuses."""

When = Literal["before", "after"]


class InjectedError(Exception):
    """The exception of a faulty call."""


@dataclass(frozen=True)
class Fault:
    call: str
    """`engine.detach`."""
    when: When
    """Whether the call has no effect, or all of it."""
    nth: int
    """Which call of the epoch fails."""


def calls() -> list[str]:
    """Every call between adapter and scheduler."""
    names = [
        f"{place}.{name}"
        for place, (declared, _) in CLASSES.items()
        for name, _ in inspect.getmembers(declared, inspect.isfunction)
        if not name.startswith("_")
    ]
    return [name for name in names if name not in UNUSED]


def inject(fault: Fault) -> None:
    """Make one call of this process fail."""
    place, name = fault.call.split(".")
    owner, seen = CLASSES[place][1], Counter[str]()
    stock: Callable[..., Any] = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        seen[name] += 1
        fails = seen[name] == fault.nth
        if fails and fault.when == "before":
            raise InjectedError(fault)
        result = stock(*args, **kwargs)
        if fails:
            raise InjectedError(fault)
        return result

    setattr(owner, name, faulty)


class FaultLoop(CrashLoop):
    """Does everything that reaches one of the calls."""

    caps = MappingProxyType({"pool": 60, "host_cap": 40, "disk_cap": DISK})
    tiers = ("auto", "host", "disk", "disk", "none")

    def __init__(self, folder: Path, pipe: int, seed: int) -> None:
        super().__init__(folder, pipe, seed)
        self.engine.shares = seed % 3 == 0

    def spec(self, **fields: Any) -> messages.RoundSpec:
        """Half of the rounds count what their caller accepts."""
        count = self.rng.choice(("finished", "accepted")) if fields["quota_unit"] == "group" else "finished"
        after = self.rng.choice(("suspend", "continue"))
        return messages.RoundSpec(**{"count": count, "after_quota": after, **fields})

    def live_with_fault(self) -> None:
        self.name_the_version()
        for _ in range(CALLS):
            self.turn()
            self.engine.controller.has_work()
            self.rng.choice(self.disturbances())()

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
        ]

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
            self.engine.step()
            self.engine.released = []


class FaultClient(CrashClient):
    """Knows that a round may end before a verdict or a prompt reaches it."""

    def _answered(self, answer: messages.Answer) -> None:
        command = self.issued.get(answer.seq)
        if answer.status == 409 and isinstance(command, messages.JudgeRound | messages.ExtendRound):
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
        super()._restored(epoch)


def failing_epoch(folder: Path, pipe: int, seed: int, fault: Fault) -> None:
    """In a forked process: live until the fault, and end as a scheduler process does."""

    def thread_ended(failed: threading.ExceptHookArgs) -> None:
        os._exit(FAILED if isinstance(failed.exc_value, InjectedError) else 1)

    threading.excepthook = thread_ended
    inject(fault)
    try:
        FaultLoop(folder, pipe, seed).live_with_fault()
    except InjectedError:
        os._exit(FAILED)
    os._exit(NO_FAULT)


def faults(seed: int) -> Iterator[Fault]:
    """Each call fails before and after its effect, the first time it is made and some time later."""
    rng = random.Random(seed)
    for call in calls():
        for when in ("before", "after"):
            yield Fault(call, when, 1)
            yield Fault(call, when, rng.randint(2, 12))
