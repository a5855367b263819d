"""Hold events back until their journal records are written, in order (`journal-before-reply`).

Acceptance is written before the round's 200, finished samples before a stream shows them, delivery before its reply.
The scheduler's loop never waits for a disk: such an event waits here until the writer's thread releases it. Later
events wait behind it; answers without a record are sent at once. If the record can never be written, the event
carries the error instead.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from sglang_april.api.errors import JOURNAL
from sglang_april.api.messages import Answer, Event, JournalFault, RoundEnded


class Outbox:
    """Used by two threads: the scheduler's thread sends, the journal's writer thread releases."""

    def __init__(self, transmit: Callable[[Event], None]) -> None:
        """`transmit` is called from either thread, but never from both at once."""
        self._transmit = transmit
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Event]] = deque()
        self._written = 0

    def send(self, event: Event, batch: int = 0) -> None:
        """Send an event after the batch of this number has been written and after all events sent earlier.

        An answer without a batch overtakes the waiting events.
        """
        with self._lock:
            overtakes = isinstance(event, Answer | JournalFault) and not batch
            if overtakes or (not self._waiting and batch <= self._written):
                self._transmit(event)
            else:
                self._waiting.append((batch, event))

    def release(self, written: int, failed: Mapping[int, str]) -> None:
        """All batches up to this number have been written, except for records of the `failed` ones."""
        with self._lock:
            self._written = max(self._written, written)
            while self._waiting and self._waiting[0][0] <= self._written:
                batch, event = self._waiting[0]
                self._transmit(_broken_promise(event, failed[batch]) if batch in failed else event)
                self._waiting.popleft()


def _broken_promise(event: Event, reason: str) -> Event:
    """The event, if a record that it waited for can never be written."""
    match event:
        case Answer():
            return Answer(event.seq, 500, JOURNAL, reason)
        case RoundEnded():
            return msgspec.structs.replace(event, error=reason)
    return event
