"""SGLang 0.5.15.post1, alone and with slime's patches (`interface.Shape`).

The loop keeps its batches in the scheduler and passes none. A request stores its KV lengths itself, and
only its row shows whether it has KV.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEPENDS_ON: tuple[str, ...] = (
    "sglang.srt.managers.schedule_batch.Req.pop_committed_kv_cache",
    "sglang.srt.managers.schedule_batch.Req.pop_overallocated_kv_cache",
    "sglang.srt.model_executor.model_runner.ModelRunner.mambaish_config",
)


def allocated(req: Any) -> int:
    return int(req.kv_allocated_len)


def give_kv(req: Any, length: int) -> None:
    req.kv_allocated_len = length
    req.kv_committed_freed = req.kv_overallocated_freed = False


def take_kv(req: Any) -> None:
    req.kv_allocated_len = 0


def enter_step(s: Any) -> None:
    """The scheduler has its batches."""


def enter_prefill(s: Any) -> None:
    """The scheduler has its batches."""


def next_batch(original: Callable[..., Any], s: Any) -> Any:
    return original(s)


def prefill(original: Callable[..., Any], s: Any) -> Any:
    return original(s)


def no_prefill(_s: Any) -> None:
    return None


def batch_of(result: Any) -> Any:
    return result


def forget_last_batch(s: Any) -> None:
    """As `pause_generation` does: `is_fully_idle` would find its requests in it."""
    s.cur_batch = None


def forward_batch(batch: Any, runner: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch.init_new(batch, runner)


def logits(processor: Any, states: "torch.Tensor", lm_head: Any, metadata: Any) -> "torch.Tensor":
    buffer, metadata.next_token_logits_buffer = metadata.next_token_logits_buffer, None
    try:
        result: torch.Tensor = processor._get_logits(states, lm_head, metadata)
    finally:
        metadata.next_token_logits_buffer = buffer
    return result


def is_recurrent(model: Any) -> bool:
    """As a `ModelRunner` of this model reports, without loading weights."""
    from sglang.srt.model_executor import model_runner

    runner = model_runner.ModelRunner.__new__(model_runner.ModelRunner)
    runner.model_config, runner.is_draft_worker = model, False
    runner._linear_attn_registry_cache = model_runner._UNSET
    return runner.mambaish_config is not None
