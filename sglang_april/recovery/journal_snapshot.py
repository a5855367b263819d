"""What a journal contains after a restart; `snapshot_reader.py` reads it."""

from typing import Any

import msgspec

from sglang_april.api.messages import (
    FinishedSample,
    KeptReply,
    Prompt,
    RoundSpec,
    SavedTrajectory,
    Span,
)


class Chunk(msgspec.Struct, array_like=True):
    """Consecutive output tokens of an unfinished sample, in the order in which they were drawn."""

    output_ids: bytes
    """int32 [tokens]."""
    logprobs: bytes
    """float32 [tokens]."""
    spans: list[Span]
    """All spans of the sample up to the end of this chunk."""
    top_logprobs: list[list[tuple[float, int]]] | None = None
    proximal: tuple[int, list[tuple[int, bytes]]] | None = None
    """Proximal logprobs since the previous chunk: the version, and (first output token, float32 [tokens]) each."""

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.output_ids) // 4


class SnapshotSample(msgspec.Struct, array_like=True):
    """A sample of an undelivered group: finished, or with the tokens it had at its last record."""

    index: int
    queue_position: int = -1
    """Number of its first admission; -1 if it never entered the engine."""
    number: int = -1
    """Number of the round, within its run, in which it first entered the engine."""
    chunk: Chunk | None = None
    finished: FinishedSample | None = None
    step: int = 0
    """Step in which it finished."""


class SnapshotGroup(msgspec.Struct, array_like=True):
    gid: int
    run: str
    """Key of its run (`run_keys.py`)."""
    incarnation: int
    prompt: Prompt
    params: bytes
    samples: list[SnapshotSample]
    """The undelivered ones."""
    accepted: bool | None = None
    """The caller's verdict; None if there is none."""

    @property
    def whole(self) -> bool:
        """Every undelivered sample has finished."""
        return all(s.finished is not None for s in self.samples)


class SnapshotRound(msgspec.Struct, array_like=True):
    """A round that was open; its prompts are among the groups."""

    spec: RoundSpec
    number: int


class JournalSnapshot(msgspec.Struct):
    """The content of a journal. Rank 0 sends it to the other ranks as msgpack."""

    version: int = 0
    next_gid: int = 0
    groups: list[SnapshotGroup] = []
    """In arrival order."""
    attached: list[SnapshotGroup] = []
    """Attached requests with tokens, unfinished or finished, in arrival order (`attached_journal.py`)."""
    trajectories: list[SavedTrajectory] = []
    """In the order in which they began; those that have left without their legs."""
    rounds: list[SnapshotRound] = []
    replies: list[KeptReply] = []
    gone: list[str] = []
    """Ids of rounds whose replies are no longer kept."""
    ids: list[tuple[str, str, int]] = []
    """(run, prompt id, next incarnation), the least recently accepted first; an empty id means all others."""
    rounds_opened: dict[str, int] = {}
    """By the key of the run."""
    epoch: str = ""
    """Name of the last server epoch with this journal; the lock files of the disk tier contain it too."""
    next_epoch: str = ""
    """Name of the epoch that begins."""
    corrupt: int = 0
    """Number of damaged records; their tokens are generated again."""
    version_damaged: bool = False
    """The record of the policy version is damaged: `version` is the newest one in any other record."""
    lost_replies: list[str] = []
    """Ids of rounds whose kept reply has a damaged record. Their callers may have received it or not."""
    lost: int = 0
    """Number of groups among them whose prompt or parameters are damaged: they are never delivered."""
    forgotten: int = 0
    """Number of unfinished attached requests beyond those that are kept, which begin anew if they are sent again."""
    repairs: list[tuple[str, tuple[Any, ...]]] = []
    """Statements that delete the damaged and the forgotten records."""
