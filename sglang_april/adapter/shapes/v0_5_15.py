"""SGLang 0.5.15.post1, alone and with slime's patches (`interface.Shape`).

The loop keeps its batches in the scheduler and passes none. A request stores its KV lengths itself, and
only its row shows whether it has KV.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_april.adapter.shapes import until_0_5_18 as common
from sglang_april.adapter.shapes.until_0_5_18 import (
    HOOKS,
    TARGETS,
    arguments,
    committed,
    end_weight_session,
    extend_range,
    forget_kv,
    forget_unused_states,
    free_pages,
    has_kv,
    has_tree,
    in_flight,
    insert,
    is_inserted,
    lock_of,
    lock_prefix,
    may_clear,
    model_config,
    next_chunk,
    prefix_caches,
    protected,
    release_kv,
    remove,
    resolved,
    row,
    sampled,
    slots_in_tree,
    start_after,
    tokens_of,
    tp_rank,
    tp_size,
    unlock,
    weight_session,
)
from sglang_april.kv.kv_pages import Pages

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEPENDS_ON",
    "HOOKS",
    "TARGETS",
    "allocated",
    "arguments",
    "batch_of",
    "committed",
    "end_weight_session",
    "enter_prefill",
    "enter_step",
    "extend_range",
    "forget_kv",
    "forget_last_batch",
    "forget_unused_states",
    "forward_batch",
    "free_pages",
    "give_kv",
    "has_kv",
    "has_tree",
    "in_flight",
    "insert",
    "is_inserted",
    "is_recurrent",
    "lock_of",
    "lock_prefix",
    "logits",
    "may_clear",
    "model_config",
    "next_batch",
    "next_chunk",
    "no_prefill",
    "prefill",
    "prefix_caches",
    "protected",
    "release_kv",
    "remove",
    "resolved",
    "row",
    "sampled",
    "slots_in_tree",
    "start_after",
    "take_kv",
    "tokens_of",
    "tp_rank",
    "tp_size",
    "unlock",
    "weight_session",
]

DEPENDS_ON: tuple[str, ...] = (
    *common.DEPENDS_ON,
    "sglang.srt.managers.schedule_batch.Req.pop_committed_kv_cache",
    "sglang.srt.managers.schedule_batch.Req.pop_overallocated_kv_cache",
    "sglang.srt.model_executor.model_runner.ModelRunner.mambaish_config",
)


def allocated(req: Any) -> int:
    return int(req.kv_allocated_len)


def give_kv(req: Any, pages: Pages, tree: Any) -> None:
    req.kv_allocated_len = pages.length
    req.kv_committed_freed = req.kv_overallocated_freed = False
    common.hold(req, pages, tree)


def take_kv(req: Any) -> None:
    req.kv_allocated_len = 0
    common.drop_prefix(req)


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
