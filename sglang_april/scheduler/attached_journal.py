"""Attached requests in the journal (`restart-loses-nothing`): one that is sent again with its `rid` after a restart
continues from its last record, and one that had been answered is answered again.

The journal does not create a request: its caller sends it again, and only then it is known where its answer goes.
"""

from collections import OrderedDict
from collections.abc import Iterable

from sglang_april.recovery.journal_snapshot import Chunk, JournalSnapshot, SnapshotGroup
from sglang_april.recovery.snapshot_reader import MAX_KEPT

MAX_TOKENS = 2**24
"""Output tokens of answered requests that the journal keeps."""


class KeptRequests:
    """Answered requests, which the journal keeps until there are too many. Unfinished ones wait to be sent again."""

    def __init__(self, saved: Iterable[SnapshotGroup] = ()) -> None:
        answered = (group for group in saved if group.samples[0].finished is not None)
        self._tokens = OrderedDict((group.gid, tokens_of(group).length) for group in answered)
        self._sum = sum(self._tokens.values())

    def add(self, gid: int, tokens: int) -> list[int]:
        """A request has been answered; returns those that are no longer kept, the oldest ones."""
        self._tokens[gid] = tokens
        self._sum += tokens
        gone = []
        while len(self._tokens) > MAX_KEPT or self._sum > MAX_TOKENS:
            oldest, count = self._tokens.popitem(last=False)
            self._sum -= count
            gone.append(oldest)
        return gone

    def remove(self, gid: int) -> None:
        """It runs again, or another request has its `rid`."""
        self._sum -= self._tokens.pop(gid, 0)


def saved_requests(saved: JournalSnapshot) -> dict[tuple[str, str], SnapshotGroup]:
    """Saved requests by run key and `rid`, the latest of each. Those without a token begin anew: they are omitted."""
    found = {(g.run, g.prompt.id.partition(":")[2]): g for g in saved.attached}
    return {key: group for key, group in found.items() if tokens_of(group).length}


def tokens_of(group: SnapshotGroup) -> Chunk:
    """All tokens of an attached request in the journal."""
    sample = group.samples[0]
    if (done := sample.finished) is not None:
        return Chunk(done.output_ids, done.logprobs, done.spans, done.top_logprobs)
    return sample.chunk or Chunk(b"", b"", [])
