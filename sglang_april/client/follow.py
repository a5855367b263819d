"""Reads events on a thread of their own."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def follow(events: Iterable[T], put: Callable[[T | BaseException], object], name: str) -> None:
    """Start a daemon thread that passes each event to `put`, and the error, if one ends them.

    The thread has the only reference to a generator that is passed directly, so the generator is closed at its end.
    """

    def read() -> None:
        try:
            for event in events:
                put(event)
        except BaseException as error:  # noqa: BLE001 - raised where the events are read
            put(error)

    threading.Thread(target=read, daemon=True, name=name).start()
