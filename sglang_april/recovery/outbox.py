"""Hold events back until their journal records are written, in order (`journal-before-reply`).

Acceptance is written before the round's 200, finished samples before a stream shows them, delivery before its reply.
The scheduler's loop never waits for a disk: such an event waits here until the writer's thread releases it. Later
events wait behind it; answers without a record are sent at once.
"""

import threading
from collections import deque
from collections.abc import Callable

from sglang_april.api.messages import Answer, Event, JournalFault


class Outbox:
    """Used by two threads: the scheduler's thread sends, the journal's writer thread releases."""

    def __init__(self, transmit: Callable[[Event], None]) -> None:
        """`transmit` is called from either thread, but never from both at once."""
        self._transmit = transmit
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Event]] = deque()
        self._written = 0

    def __len__(self) -> int:
        return len(self._waiting)

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

    def release(self, written: int) -> None:
        """All batches up to this number have been written."""
        with self._lock:
            self._written = max(self._written, written)
            while self._waiting and self._waiting[0][0] <= self._written:
                self._transmit(self._waiting[0][1])
                self._waiting.popleft()
