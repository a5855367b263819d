"""How much of the machine other processes use while a part of the demo runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil


@dataclass
class OtherLoad:
    """The share of all cores, 0 to 1, that processes outside of the demo used; 0 until the part has ended."""

    share: float = 0.0


@contextlib.contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Measure it over the context. Children of this process, such as the server, belong to the demo."""
    measured = OtherLoad()
    began, busy, own = time.monotonic(), _busy(), _own()
    try:
        yield measured
    finally:
        available = (time.monotonic() - began) * (psutil.cpu_count() or 1)
        others = _busy() - busy - (_own() - own)
        measured.share = min(1.0, max(0.0, others / available)) if available else 0.0


def _busy() -> float:
    """CPU seconds of all processes since the machine started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _own() -> float:
    """CPU seconds of this process, of its living descendants, and of the children that have ended."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and both of children that were waited for
    return total
