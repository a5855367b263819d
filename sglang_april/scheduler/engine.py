"""What the controller asks of one SGLang scheduler; each supported SGLang version implements it in `adapter/`.

Every method is called between two steps, on every rank alike. Nothing here may block on another rank.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_april.api.messages import Event, FinishedSample
from sglang_april.kv.kv_pages import Pages
from sglang_april.recovery.journal_snapshot import Chunk
from sglang_april.scheduler.state import Group, Sample


class Engine(Protocol):
    overlap: bool
    """Whether one step may be in flight while the next is scheduled."""
    page_size: int
    bytes_per_token: int
    """KV bytes of one token over all ranks, on the device."""
    stored_bytes_per_token: int
    """The same in the host and the disk tier."""
    kv_pages: str
    """What pages are there: `full`, or `int8` (lossy)."""
    version: int
    """Policy version that goes into the cache key of every request made from now on."""

    def send(self, event: Event) -> None:
        """To the HTTP process (rank 0 only; elsewhere nothing happens)."""

    def settle(self) -> None:
        """Take in the step in flight, so that every request's state is final; finished ones leave the batch."""

    def forward_count(self) -> int:
        """Forwards of the model so far, anyone's."""

    # --- slots and memory

    def free_slots(self) -> int:
        """Places in the running batch that nobody has, less our requests that already wait for one."""

    def foreign_waiting(self) -> int:
        """Stock requests in the waiting queue."""

    def idle(self) -> bool:
        """Nothing runs and nothing waits to be prefilled."""

    def row_slots(self) -> int:
        """Rows that the running batch can take at this very point of the step."""

    def memory_released(self) -> list[str]:
        """Tags of `release_memory_occupation` that have not been resumed."""

    def mid_prefill(self) -> bool:
        """A prompt is being prefilled in chunks."""

    def pool_tokens(self) -> dict[str, int]:
        """Tokens of the KV pool by owner: available, evictable, protected, running; and their total (S10)."""

    def tokens_free(self) -> int:
        """Pool tokens that are free or can be had by evicting the tree."""

    def tokens_for_next_decode(self) -> int:
        """Pool tokens that the running batch needs for its next step."""

    def prefill_budget(self) -> int:
        """Tokens that SGLang would give to new prefills now, its estimate for running requests taken off."""

    def first_waiting_need(self) -> int:
        """Tokens that the first waiting request, anyone's, needs by that estimate; 0 without one."""

    def remaining_estimate(self, sample: Sample) -> int:
        """Tokens that SGLang's budget sets aside for the rest of this sample; it may have no request yet."""

    # --- samples

    def start(self, sample: Sample, *, proximal: bool) -> None:
        """Put a sample without KV into the waiting queue: a new one, or one whose old tokens are prefilled again."""

    def shares_prompt(self, group: Group) -> bool:
        """Whether its members can `follow` one that has been prefilled; the answer never changes."""

    def follow(self, sample: Sample) -> bool:
        """Put a queued sample on the KV of its prompt, but for the last token: in `sample.pages`, ready to `attach`.

        False, and nothing changed, where the engine does not have all of it.
        """

    def attach(self, samples: Sequence[Sample]) -> None:
        """Let samples on their device pages join the running batch as plain decode rows."""

    def detach(self, samples: Sequence[Sample]) -> None:
        """Take samples out of all queues and batches; those with output tokens and KV keep it in `sample.pages`."""

    def forget(self, sample: Sample) -> None:
        """Let go of everything that a deleted sample holds outside of queues and batches."""

    def finished(self, sample: Sample, reason: dict[str, Any] | None) -> FinishedSample:
        """The result of a sample that has ended; `reason` where the engine itself recorded none."""

    def record(self, sample: Sample, start: int) -> Chunk:
        """Output tokens [start, length) of a sample that is not finished, with all that is said of them (rank 0)."""

    def newest_first(self, samples: Sequence[Sample]) -> list[Sample]:
        """Running samples with KV, the one admitted last in front."""

    # --- pages

    def regain(self, sample: Sample) -> None:
        """After a restart: the file that was found is the sample's copy."""

    def revive(self, sample: Sample) -> bool:
        """After a restart: make a request for a sample whose copy was found, outside of all queues and batches.

        False if SGLang does not take it; nothing changed.
        """

    def copy_out(self, sample: Sample, order: int) -> None:
        """Begin to copy `sample.pages` to where its `copy` says; the slots stay as they are. Returns at once.

        This and what else has an order is carried out by each rank in the order in which it was asked for, and ends
        with a `wire.Moved` that names it.
        """

    def load(self, sample: Sample, order: int) -> bool:
        """Allocate slots and begin to load the sample's copy; False when there is no room (nothing changed)."""

    def spill(self, sample: Sample, order: int) -> None:
        """Begin to move a copy from the host to the disk."""

    def verify(self, order: int, stored: Sequence[Pages]) -> None:
        """Recount the pool (S10) with what is `stored`, and begin to check every copy; the order fails with why."""

    def wait(self, order: int) -> None:
        """Until this rank, not all, has carried the order out."""

    def free_pages(self, pages: Pages) -> None:
        """Give the device slots back, and the lock on the tree with them; a copy remains."""

    def discard(self, number: int) -> None:
        """Let a copy or a prefix go, after whatever was asked for before."""

    def release(self, sample: Sample) -> None:
        """Give the sample's device pages back, if it has any; only its tokens remain."""

    def held_tokens(self, pages: Pages) -> int:
        """Pool tokens, in whole pages, that device pages hold outside of the tree."""

    def renew_keys(self) -> None:
        """The version has moved: renew the cache key of every request without KV; prefixes of older ones are let go."""
