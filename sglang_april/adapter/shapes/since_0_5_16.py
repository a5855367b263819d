"""What 0.5.16 and later releases have in common (`interface.Shape`).

The scheduler loop passes its batches to the choice of the next one, a plan.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Since0516:
    def enter_step(self, s: Any, running_batch: Any, last_batch: Any) -> None:
        s.running_batch, s.last_batch = running_batch, last_batch

    def enter_prefill(self, s: Any, running_batch: Any) -> None:
        s.running_batch = running_batch

    def next_batch(self, original: Callable[..., Any], s: Any) -> Any:
        return original(s, running_batch=s.running_batch, last_batch=s.last_batch)

    def prefill(self, original: Callable[..., Any], s: Any) -> Any:
        return original(s, s.running_batch)

    def no_prefill(self, s: Any) -> Any:
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        return NextBatchPlan(batch_to_run=None, running_batch=s.running_batch)

    def batch_of(self, result: Any) -> Any:
        return result.batch_to_run

    def forget_last_batch(self, s: Any) -> None:
        """Nothing else refers to it."""

    def forward_batch(self, batch: Any, runner: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)

    def logits(self, processor: Any, states: "torch.Tensor", lm_head: Any, metadata: Any) -> "torch.Tensor":
        result: torch.Tensor = processor._get_logits(states, lm_head, metadata, use_logits_buffer=False)
        return result

    def is_recurrent(self, model: Any) -> bool:
        from sglang.srt.configs.hybrid_arch import mambaish_config

        return mambaish_config(model) is not None
