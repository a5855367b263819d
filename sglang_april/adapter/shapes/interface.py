"""What a shape provides.

`s` is SGLang's `Scheduler`, `req` its `Req`, `tree` its prefix cache, `args` its `ServerArgs`.

A `lock` protects the KV of a prefix in the tree. Locks of the same prefix, in the same place, are equal.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sglang_april.adapter.hook import Hook
from sglang_april.kv.kv_pages import Pages

if TYPE_CHECKING:
    import torch


class Argument(NamedTuple):
    """One field of `ServerArgs`."""

    name: str
    value: Any
    """As SGLang will use it: what it has resolved so far, else what the user gave."""
    default: Any


class Shape(Protocol):
    """The interface of `SHAPE` in `shapes/<release>.py`, one for each group of releases."""

    DEPENDS_ON: tuple[str, ...]
    """Dotted paths of what only this shape calls, or relies on, without hooking it."""
    TARGETS: Mapping[str, tuple[str, ...]]
    """Where symbols of `hook_table.py` and `dependencies.py` are in these releases; empty for those that are gone."""
    HOOKS: tuple[Hook, ...]
    """Hooks that only these releases need."""

    # --- arguments

    def arguments(self, args: Any) -> Iterator[Argument]:
        """All fields."""

    def resolved(self, args: Any) -> Any:
        """An object with the resolved values of all fields as attributes."""

    def model_config(self, args: Any) -> Any:
        """SGLang's `ModelConfig` of the model."""

    # --- KV of a request

    def has_kv(self, req: Any) -> bool:
        """Whether it has a request slot, whose row lists its token slots."""

    def row(self, req: Any) -> Any:
        """Its request slot, or None."""

    def allocated(self, req: Any) -> int:
        """Tokens for which a request with KV has slots."""

    def committed(self, req: Any) -> int:
        """Tokens whose KV has been computed, or is computed by the forward in flight."""

    def protected(self, req: Any) -> int:
        """Leading tokens whose slots the tree owns."""

    def lock_of(self, req: Any) -> Any:
        """The lock on its protected tokens."""

    def forget_kv(self, req: Any) -> None:
        """Make a request without KV ready for a new request slot."""

    def give_kv(self, req: Any, pages: Pages, tree: Any) -> None:
        """The row of a request holds the slots of these pages: it has their KV, and their lock, from now on."""

    def take_kv(self, req: Any) -> None:
        """A request whose row was freed has no KV from now on; neither its slots nor its lock are freed."""

    def start_after(self, req: Any, pages: Pages, tokens: int, tree: Any) -> None:
        """The prefill of a request without KV begins after the first `tokens` tokens of these pages."""

    def next_chunk(self, s: Any, req: Any) -> None:
        """The next chunk of a prefill whose KV does not enter the tree begins after this one."""

    def extend_range(self, req: Any, prefix: "torch.Tensor", end: int) -> None:
        """Prefill the tokens after a prefix, whose slots are `prefix`, up to `end`, without SGLang's admission."""

    def release_kv(self, req: Any, tree: Any) -> None:
        """Free the KV of a request; the tree does not keep it."""

    def is_inserted(self, *args: Any, **kwargs: Any) -> bool:
        """Whether `release_kv_cache`, with these arguments after the tree, lets the tree keep the KV."""

    # --- the prefix cache and the allocator

    def prefix_caches(self) -> tuple[type, ...]:
        """The supported prefix caches."""

    def has_tree(self, tree: Any) -> bool:
        """Whether requests share prefixes."""

    def slots_in_tree(self, tree: Any) -> "torch.Tensor":
        """int64: the token slots that the tree owns."""

    def free_pages(self, allocator: Any) -> "torch.Tensor":
        """Page numbers of all free pages."""

    def lock_prefix(self, tree: Any, req: Any, length: int) -> "tuple[torch.Tensor, Any] | None":
        """Lock the first `length` prompt tokens of a request; their slots, int64 [length], and the lock.

        None, without a lock, if the tree lacks some of them.
        """

    def unlock(self, tree: Any, lock: Any) -> None:
        """Release a lock."""

    def insert(self, tree: Any, req: Any, ids: Any, slots: "torch.Tensor") -> "torch.Tensor":
        """Give whole pages of a request's KV to the tree, whose own slots replace those that it had already.

        The request's lock protects them from now on. Returns its slots, int64 like `slots`.
        """

    # --- the scheduler

    def tp_rank(self, s: Any) -> int:
        """The tensor-parallel rank of this process."""

    def tp_size(self, s: Any) -> int:
        """Tensor-parallel ranks."""

    def beam_rows(self, s: Any, reqs: Iterable[Any]) -> int:
        """Rows of a decode beyond one for each of these requests: those of the beams of a beam search.

        It looks at the requests only while there is a beam search.
        """

    def may_clear(self, manager: Any, s: Any) -> bool:
        """Whether a flush would clear the KV pool. `manager` is the scheduler, or the owner of its `is_fully_idle`."""

    def in_flight(self, s: Any) -> Iterable[Any]:
        """Requests in batches that run or have run."""

    def enter_step(self, s: Any, *args: Any, **kwargs: Any) -> None:
        """Store the batches that SGLang passes to `get_next_batch_to_run`."""

    def enter_prefill(self, s: Any, *args: Any, **kwargs: Any) -> None:
        """Store the batches that SGLang passes to `get_new_batch_prefill`."""

    def next_batch(self, original: Callable[..., Any], s: Any) -> Any:
        """Call `get_next_batch_to_run`."""

    def prefill(self, original: Callable[..., Any], s: Any) -> Any:
        """Call `get_new_batch_prefill`."""

    def no_prefill(self, s: Any) -> Any:
        """The result of `get_new_batch_prefill` when there is nothing to prefill."""

    def batch_of(self, result: Any) -> Any:
        """The batch in a result of `get_next_batch_to_run` or `get_new_batch_prefill`, or None."""

    def forget_last_batch(self, s: Any) -> None:
        """The step in flight was processed, and its batch merged or dropped."""

    def remove(self, batch: Any, reqs: Sequence[Any]) -> None:
        """Remove these requests, and those that have finished, from a batch."""

    # --- weights

    def record_label(
        self, original: Callable[..., None], s: Any, label: str | None, suspended: Iterable[tuple[Any, int]]
    ) -> None:
        """Call `record_weight_version_change`, also for suspended requests, with their number of output tokens."""

    def weight_session(self, manager: Any, recv_req: Any, *, keep: bool) -> AbstractContextManager[None]:
        """A context in which SGLang accepts this weight call.

        Args:
            keep: other calls of the same push may follow, and `end_weight_session` is called after the last one.
        """

    def end_weight_session(self, s: Any) -> None:
        """End what `weight_session`, or a client, has left open."""

    # --- forwards and models

    def sampled(self, tokens: "torch.Tensor", stock: Any = None) -> Any:
        """A result of `Sampler._sample_from_probs` with these tokens. `stock` is SGLang's own result, if it has one."""

    def tokens_of(self, stock: Any) -> "torch.Tensor":
        """The tokens in a result of `Sampler._sample_from_probs`."""

    def forward_batch(self, batch: Any, runner: Any) -> Any:
        """The `ForwardBatch` of a `ScheduleBatch`."""

    def logits(self, processor: Any, states: "torch.Tensor", lm_head: Any, metadata: Any) -> "torch.Tensor":
        """`LogitsProcessor._get_logits` in separate memory: float [rows, vocabulary] from states [rows, hidden]."""

    def is_recurrent(self, model: Any) -> bool:
        """Whether a `ModelConfig` is that of a model with recurrent state."""
