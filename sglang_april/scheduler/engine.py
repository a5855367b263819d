"""The interface between the controller and one SGLang scheduler; `adapter/` implements it per SGLang version.

Every method is called between two steps, on every rank alike. No method may block on another rank.
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
    """Tokens per page of the KV pool."""
    bytes_per_token: int
    """KV bytes of one token over all ranks, on the device."""
    stored_bytes_per_token: int
    """The same in the host and the disk tier."""
    kv_pages: str
    """Format of stored pages: `full`, or `int8` (lossy)."""
    preempts: bool
    """Whether a waiting request may take the slot of a running one of lower priority."""
    gpus: list[str]
    """UUIDs of the GPUs of all ranks; empty on a CPU."""
    version: int
    """Policy version in the cache key of every new request."""

    def send(self, event: Event) -> None:
        """Send to the HTTP process; a no-op on ranks other than 0."""

    def settle(self) -> None:
        """Process the step in flight, so that every request's state is final; finished ones leave the batch.

        `Controller.progress` gets all rows that ran.
        """

    def forward_count(self) -> int:
        """Forwards of the model so far, including those of stock requests."""

    # --- slots and memory

    def free_slots(self) -> int:
        """Free slots of the running batch, minus the samples that were admitted and wait for one."""

    def foreign_waiting(self) -> int:
        """Requests in the waiting queue that no admission has queued: stock ones, and attached ones that arrive."""

    def idle(self) -> bool:
        """Nothing runs and nothing waits to be prefilled."""

    def row_slots(self) -> int:
        """Rows that can join the running batch at this point of the step; not positive if all slots are taken."""

    def memory_released(self) -> list[str]:
        """Tags of `release_memory_occupation` that have not been resumed."""

    def mid_prefill(self) -> bool:
        """Whether a chunked prefill is in progress."""

    def pool_tokens(self) -> dict[str, int]:
        """Tokens of the KV pool: available, evictable, protected, running; and `total` (`pool-accounting`)."""

    def tokens_free(self) -> int:
        """Pool tokens that are free, or become so by evicting the radix tree."""

    def tokens_for_next_decode(self) -> int:
        """Pool tokens that the running batch needs for its next step."""

    def most_for_next_decode(self) -> int:
        """An upper bound of `tokens_for_next_decode` that needs no look at each row."""

    def prefill_budget(self) -> int:
        """Pool tokens that SGLang would give to new prefills now: `tokens_free`, less its estimate for running ones."""

    def first_waiting_need(self) -> int:
        """Tokens by that estimate of the first waiting request, rollout or stock; 0 without one."""

    def first_waiting_on_kv(self) -> Sample | None:
        """The sample of that request, if it is prefilled behind KV of its own, which its need does not contain."""

    def remaining_estimate(self, sample: Sample) -> int:
        """Tokens that SGLang's budget reserves for the rest of this sample; it may have no request yet."""

    # --- samples

    def start(self, sample: Sample, *, proximal: bool) -> None:
        """Queue a sample without KV for a prefill: a new one, or one whose old tokens are prefilled again.

        Args:
            proximal: collect the old tokens' logprobs under the current policy.
        """

    def collect_proximal(self, sample: Sample, *, wanted: bool) -> None:
        """Before a recompute: collect the old tokens' logprobs under the current policy, or discard collected ones.

        Those of an earlier recompute never stay, because this one would add to them under its own version.
        """

    def shares_prompt(self, group: Group) -> bool:
        """Whether members can `follow` one that has been prefilled; constant for a group."""

    def follow(self, sample: Sample) -> bool:
        """Give a queued sample the pages of its prompt except for the last token, ready to `attach`.

        False, and nothing changes, if the engine does not have all of them.
        """

    def attach(self, samples: Sequence[Sample]) -> None:
        """Let samples join the running batch as plain decode rows on their device pages."""

    def end_weight_session(self) -> None:
        """Let SGLang finish the weight update that calls of a push have begun, if it has begun one."""

    def hand_over(self, sample: Sample) -> None:
        """The pages of a leg without tokens belong to its request, whose prefill after them is launched."""

    def detach(self, samples: Sequence[Sample]) -> None:
        """Take samples out of all queues and batches; `kv.pages` keeps the KV of those with output tokens."""

    def refused(self, sample: Sample) -> bool:
        """Whether the engine refuses the attached request after queueing it, and draws one token of another prompt."""

    def has_described(self, sample: Sample) -> bool:
        """Whether the engine's answer to an attached request contains its description, so that no event has to."""

    def answer_aborted(self, sample: Sample) -> None:
        """Answer an attached request that is in no queue and no batch: aborted, with the tokens that it has."""

    def forget(self, sample: Sample) -> None:
        """Release everything that a deleted sample holds outside of queues and batches."""

    def finished(self, sample: Sample, reason: dict[str, Any] | None) -> FinishedSample:
        """The result of a sample that has ended; `reason` if the engine's request has none.

        When a leg of a trajectory finishes, `kv.pages` keeps its KV.
        """

    def answered(self, sample: Sample) -> FinishedSample | None:
        """The result of an attached request that has ended; None if it was aborted. It is not changed."""

    def record(self, sample: Sample, start: int) -> Chunk:
        """Output tokens [start, length) of an unfinished sample with their logprobs, for the journal (rank 0)."""

    def output_length(self, sample: Sample) -> int:
        """Output tokens of a running sample so far, without those of the step in flight."""

    def newest_first(self, samples: Sequence[Sample]) -> list[Sample]:
        """Running samples with KV, the last admitted one first."""

    # --- pages

    def recover_kv(self, sample: Sample) -> None:
        """After a restart: use the file that was found as the sample's copy."""

    def rebuild_request(self, sample: Sample) -> bool:
        """After a restart: make a request for a sample with a recovered copy, outside of all queues and batches.

        False, and nothing changes, if SGLang refuses it.
        """

    def copy_out(self, sample: Sample, order: int) -> None:
        """Begin to copy the sample's pages to the tier of their `copy`; the slots stay as they are.

        Returns at once. Each rank carries out its orders in sequence, except that loads overtake; a `Moved` message
        reports the end of each.
        """

    def load(self, sample: Sample, order: int) -> bool:
        """Allocate slots and begin to load the sample's copy; False, and nothing changes, without room."""

    def spill(self, sample: Sample, order: int) -> None:
        """Begin to move a copy from the host to the disk."""

    def verify(self, order: int, stored: Sequence[Pages]) -> None:
        """Recount the pool given the `stored` pages, and begin to check every copy; failures are reported."""

    def wait(self, order: int) -> None:
        """Block until this rank has carried the order out."""

    def cancel(self, order: int) -> None:
        """End a copy out or a load, whose slots are free afterwards: a rank that has not begun it skips it, and one
        that carries it out blocks until it has stopped. Its end is reported like that of other orders."""

    def free_pages(self, pages: Pages) -> None:
        """Free the device slots and unlock the radix tree; a copy remains."""

    def discard(self, number: int) -> None:
        """Discard a copy or a prefix, after all earlier orders for it."""

    def release(self, sample: Sample) -> None:
        """Free the sample's device pages, if any; only its tokens remain."""

    def held_tokens(self, pages: Pages) -> int:
        """Pool tokens, in whole pages, that device pages hold outside of the radix tree."""

    def renew_keys(self) -> None:
        """The version has moved, or is unknown: renew the cache keys of requests without KV, evict unused prefixes."""
