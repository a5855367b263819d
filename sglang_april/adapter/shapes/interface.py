"""What a shape provides. `s` is SGLang's `Scheduler`, `req` its `Req`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Shape(Protocol):
    """The interface of `shapes/<shape>.py`."""

    DEPENDS_ON: tuple[str, ...]
    """Dotted paths of what only this shape calls, or relies on, without hooking it."""

    # --- KV of a request

    def allocated(self, req: Any) -> int:
        """Tokens for which a request with KV has slots."""

    def give_kv(self, req: Any, length: int) -> None:
        """A request whose row holds slots for `length` tokens has KV from now on."""

    def take_kv(self, req: Any) -> None:
        """A request whose row was freed has no KV from now on; its slots are not freed."""

    # --- the scheduler loop

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

    # --- forwards and models

    def forward_batch(self, batch: Any, runner: Any) -> Any:
        """The `ForwardBatch` of a `ScheduleBatch`."""

    def logits(self, processor: Any, states: "torch.Tensor", lm_head: Any, metadata: Any) -> "torch.Tensor":
        """`LogitsProcessor._get_logits` in separate memory: float [rows, vocabulary] from states [rows, hidden]."""

    def is_recurrent(self, model: Any) -> bool:
        """Whether a `ModelConfig` is that of a model with recurrent state."""
