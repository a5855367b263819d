"""Step 6 of 9 (reply): what may leave only once it is on disk, in its order (`journal-before-reply`).

Acceptance is written before the round's 200, delivery before its reply. The scheduler's loop never waits for a disk, so
such a message waits here, and the writer's thread lets it go. What must come behind it waits too; all else leaves at
once.
"""

import threading
from collections import deque
from collections.abc import Callable

from sglang_april.api.messages import Answer, Event, JournalFault


class Outbox:
    """Used by two threads: the scheduler's sends, the journal's writer releases."""

    def __init__(self, transmit: Callable[[Event], None]) -> None:
        """`transmit` must bear being called from either thread; never from both at once."""
        self._transmit = transmit
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Event]] = deque()
        self._written = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, event: Event, batch: int = 0) -> None:
        """Send an event once the batch of this number has been written, and behind those sent earlier.

        An answer that needs no batch stands for itself: it overtakes what waits.
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
