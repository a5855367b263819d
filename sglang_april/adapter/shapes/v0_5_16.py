"""SGLang 0.5.16, 0.5.17 and 0.5.18 (`interface.Shape`)."""

from typing import TYPE_CHECKING, Any

from sglang_april.adapter.shapes import until_0_5_18 as common
from sglang_april.adapter.shapes.batch_plan import (
    batch_of,
    enter_prefill,
    enter_step,
    forget_last_batch,
    next_batch,
    no_prefill,
    prefill,
)
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
    "sglang.srt.configs.hybrid_arch.mambaish_config",
    "sglang.srt.managers.schedule_batch.NextBatchPlan",
    "sglang.srt.managers.schedule_batch.ReqKvInfo",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
)


def allocated(req: Any) -> int:
    return int(req.kv.kv_allocated_len)


def give_kv(req: Any, pages: Pages, tree: Any) -> None:
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    req.kv = ReqKvInfo(kv_allocated_len=pages.length, swa_evicted_seqlen=0)
    common.hold(req, pages, tree)


def take_kv(req: Any) -> None:
    req.kv = None
    common.drop_prefix(req)


def forward_batch(batch: Any, runner: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)


def logits(processor: Any, states: "torch.Tensor", lm_head: Any, metadata: Any) -> "torch.Tensor":
    result: torch.Tensor = processor._get_logits(states, lm_head, metadata, use_logits_buffer=False)
    return result


def is_recurrent(model: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None
