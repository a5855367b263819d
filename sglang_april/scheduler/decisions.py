"""Digests of scheduling decisions, which every TP rank must make alike (`rank-determinism`).

Each rank sends the decisions of a step to the next rank, which compares them with its own (`PeerComparison`). The last
rank sends them to the first, so ranks that do not all decide alike always include two neighbours that differ.
"""

import threading
from array import array
from collections import deque
from collections.abc import Sequence
from zlib import crc32

import msgspec

from sglang_april.scheduler.state import Sample

NAMED = 3
"""How many decisions of a step, and how many samples of each, a report names."""
MAX_TEXT = 500


class RanksDifferError(RuntimeError):
    """Two ranks have decided differently. The message is one sentence."""


class Decided(msgspec.Struct, array_like=True, tag="decided"):
    """The decisions of one step, for another rank to compare with its own."""

    step: int
    digest: int
    """Digest of all decisions up to this step."""
    text: str
    """The first decisions of the step, for people."""


class Decisions:
    """The rolling digest of one rank."""

    def __init__(self) -> None:
        self.digest = 0
        self._of_step: list[tuple[str, int, Sequence[Sample]]] = []

    def add(self, decision: str, samples: Sequence[Sample], detail: object = None) -> None:
        """Samples count by their numbers and lengths, so that ranks which drew other tokens also differ.

        Args:
            detail: counts with its `repr`, and is not named in messages.
        """
        numbers = array("q", [n for s in samples for n in (s.group.gid, s.index, s.length)])
        text = decision if detail is None else f"{decision} {detail}"
        self.digest = crc32(numbers, crc32(text.encode(), self.digest))
        self._of_step.append((decision, len(samples), samples[:NAMED]))

    def end_step(self, step: int) -> Decided | None:
        """What was decided since the last call; None if nothing was."""
        made, self._of_step = self._of_step, []
        if not made:
            return None
        text = ", ".join(_describe(*decision) for decision in made[:NAMED])
        return Decided(step, self.digest, (text + _more(len(made)))[:MAX_TEXT])


def _describe(decision: str, count: int, first: Sequence[Sample]) -> str:
    names = "".join(f" {s.group.id[:40]}[{s.index}]" for s in first)
    return decision[:80] + names + _more(count)


def _more(count: int) -> str:
    return f" and {count - NAMED} more" if count > NAMED else ""


class PeerComparison:
    """Compares the decisions of one rank with those that the rank before it reports.

    Both methods raise `RanksDifferError`. The loop calls `launched` and a thread calls `received`, because the forward
    after different decisions may never return.
    """

    def __init__(self, rank: int, peer: int) -> None:
        self._rank, self._peer = rank, peer
        self._step = -1
        self._own: deque[Decided] = deque()
        self._reported: deque[Decided] = deque()
        self._lock = threading.Lock()

    def launched(self, step: int, own: Decided | None) -> None:
        """This rank is about to launch the forward of a step, after these decisions."""
        if own is not None:
            with self._lock:  # the step and its decisions become visible to `received` together
                self._own.append(own)
                self._step = step
                self._compare()
            return
        self._step = step
        if self._reported:
            with self._lock:
                self._compare()

    def received(self, reported: Decided) -> None:
        """The other rank's next report; it is compared as soon as this rank has come as far."""
        with self._lock:
            self._reported.append(reported)
            self._compare()

    def _compare(self) -> None:
        while self._reported and self._reported[0].step <= self._step:
            reported = self._reported.popleft()
            # Reports come in order: the peer has not made an earlier decision that it has not reported.
            own = self._own.popleft() if self._own and self._own[0].step <= reported.step else None
            if own != reported:
                raise RanksDifferError(self._sentence(own, reported))

    def _sentence(self, own: Decided | None, reported: Decided) -> str:
        step = reported.step if own is None else own.step
        own_text = own.text if own is not None else "nothing"
        peer_text = reported.text if reported.step == step else "nothing"
        if own_text == peer_text:
            own_text, peer_text = (
                f"{own_text} (digest {own.digest if own else 0:08x})",
                f"{peer_text} (digest {reported.digest:08x})",
            )
        return (
            f"TP ranks decided differently at step {step}: rank {self._peer} decided {peer_text}; "
            f"rank {self._rank} decided {own_text}"
        )
