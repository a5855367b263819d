"""Faults: which calls between adapter and scheduler can fail, and how one is made to (`fail-stop`).

The calls are the methods of the `Engine` protocol in one direction, those of the `Controller` and of `Attached` in the
other, and those of the recorder. They are read from the code, so a new method is covered without a change here.
"""

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sglang_april.scheduler.attached import Attached
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.engine import Engine
from sglang_april.scheduler.recorder import Recorder
from tests.unit.storing_engine import StoringEngine

CLASSES: dict[str, tuple[type, type]] = {
    "engine": (Engine, StoringEngine),
    "controller": (Controller, Controller),
    "attached": (Attached, Attached),
    "recorder": (Recorder, Recorder),
}
"""Where a call belongs: the class that declares its methods, and the one whose methods fail."""
UNUSED = {
    "recorder.close": "only tests call it",
    "engine.rebuild_request": "the engine in memory has requests for all samples once it is restored",
}

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


def faults(seed: int, *, later: bool) -> Iterator[Fault]:
    """Each call fails before and after its effect, the first time it is made and, if asked, some time later."""
    rng = random.Random(seed)
    for call in calls():
        for when in ("before", "after"):
            yield Fault(call, when, 1)
            if later:
                yield Fault(call, when, rng.randint(2, 12))
