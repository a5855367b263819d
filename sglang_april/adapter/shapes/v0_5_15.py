"""SGLang 0.5.15.post1, alone and with slime's patches (`interface.Shape`).

The loop keeps its batches in the scheduler and passes none. A request stores its KV lengths itself, and
only its row shows whether it has KV.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_april.adapter.shapes.interface import Shape
from sglang_april.adapter.shapes.until_0_5_18 import Until0518
from sglang_april.kv.kv_pages import Pages

if TYPE_CHECKING:
    import torch


class Release0515(Until0518):
    DEPENDS_ON: tuple[str, ...] = (
        *Until0518.DEPENDS_ON,
        "sglang.srt.managers.schedule_batch.Req.pop_committed_kv_cache",
        "sglang.srt.managers.schedule_batch.Req.pop_overallocated_kv_cache",
        "sglang.srt.model_executor.model_runner.ModelRunner.mambaish_config",
    )

    def allocated(self, req: Any) -> int:
        return int(req.kv_allocated_len)

    def give_kv(self, req: Any, pages: Pages, tree: Any) -> None:
        req.kv_allocated_len = pages.length
        req.kv_committed_freed = req.kv_overallocated_freed = False
        self._hold(req, pages, tree)

    def take_kv(self, req: Any) -> None:
        req.kv_allocated_len = 0
        self._drop_prefix(req)

    def enter_step(self, s: Any) -> None:
        """The scheduler has its batches."""

    def enter_prefill(self, s: Any) -> None:
        """The scheduler has its batches."""

    def next_batch(self, original: Callable[..., Any], s: Any) -> Any:
        return original(s)

    def prefill(self, original: Callable[..., Any], s: Any) -> Any:
        return original(s)

    def no_prefill(self, _s: Any) -> None:
        return None

    def batch_of(self, result: Any) -> Any:
        return result

    def forget_last_batch(self, s: Any) -> None:
        """As `pause_generation` does: `is_fully_idle` would find its requests in it."""
        s.cur_batch = None

    def forward_batch(self, batch: Any, runner: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        return ForwardBatch.init_new(batch, runner)

    def logits(self, processor: Any, states: "torch.Tensor", lm_head: Any, metadata: Any) -> "torch.Tensor":
        buffer, metadata.next_token_logits_buffer = metadata.next_token_logits_buffer, None
        try:
            result: torch.Tensor = processor._get_logits(states, lm_head, metadata)
        finally:
            metadata.next_token_logits_buffer = buffer
        return result

    def is_recurrent(self, model: Any) -> bool:
        """As a `ModelRunner` of this model reports, without loading weights."""
        from sglang.srt.model_executor import model_runner

        runner = model_runner.ModelRunner.__new__(model_runner.ModelRunner)
        runner.model_config, runner.is_draft_worker = model, False
        runner._linear_attn_registry_cache = model_runner._UNSET
        return runner.mambaish_config is not None


SHAPE: Shape = Release0515()
