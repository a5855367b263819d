"""What is hooked and called in SGLang 0.5.23, where this differs from earlier releases (`v0_5_23`)."""

from collections.abc import Mapping

from sglang_april.adapter.hook import Hook

_ARGS = "sglang.srt.server_args.ServerArgs."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker."
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
_BATCH = "sglang.srt.managers.schedule_batch."
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
_CORES = "sglang.srt.mem_cache.unified_cache."

TARGETS: Mapping[str, tuple[str, ...]] = {
    # msgspec calls the `__post_init__` that the class had when it was created, whatever replaces it.
    _ARGS + "__post_init__": (_ARGS + "resolve_once",),
    _TOKENIZER + "_discard_pending_req_states": (_TOKENIZER + "_release_req_states_on_failure",),
    _TOKENIZER + "_wait_one_response": (_TOKENIZER + "_wait_one_response", _TOKENIZER + "_stream_one_response"),
    _WORKER + "update_weights_from_disk": (_RUNNER + "update_weights_from_disk",),
    _WORKER + "update_weights_from_distributed": (_RUNNER + "load_weights_from_distributed",),
    _WORKER + "update_weights_from_tensor": (_RUNNER + "update_weights_from_tensor",),
    _WORKER + "update_weights_from_ipc": (_RUNNER + "update_weights_from_ipc",),
}

HOOKS: tuple[Hook, ...] = (
    Hook(
        "around",
        "hooks_http:without_audit",
        (_CONTROL + "begin_weight_update", _CONTROL + "end_weight_update"),
        "a request of the audit must not make a weight call wait or a flush fail",
        "upstream rescores samples itself",
    ),
    Hook(
        "around",
        "hooks_control:begin_push",
        (_WEIGHTS + "begin_weight_update",),
        "the weight calls of a session are one push, with samples out of the engine",
        "upstream pauses its own requests around a push",
    ),
    Hook(
        "around",
        "hooks_control:end_push",
        (_WEIGHTS + "end_weight_update",),
        "the version moves at the end of a session",
        "upstream pauses its own requests around a push",
    ),
    Hook(
        "around",
        "hooks_control:read_weights",
        (_WORKER + "deserialize_own_rank", _RUNNER + "receive_weights_from_distributed"),
        "weights that cannot be read on one rank fail on all ranks, and the server keeps running",
        "upstream combines the outcome over the ranks",
    ),
    Hook(
        "around",
        "hooks_control:record_weight_label",
        (_SCHEDULER + "record_weight_version_change",),
        "the `weight_versions` of an attached request that is suspended have the border at its tokens",
        "upstream keeps requests through weight calls",
    ),
    Hook(
        "around",
        "hooks_legs:prefix_slots",
        (_TREE + "prefix_device_indices",),
        "a leg begins on the KV of the previous leg, which need not be in the radix tree",
        "upstream keeps KV between the turns of an agent over weight updates",
    ),
)

DEPENDS_ON: tuple[str, ...] = (
    # Arguments.
    "sglang.srt.arg_groups.arg_utils.record_fields",
    "sglang.srt.arg_groups.arg_utils.with_fallback",
    "sglang.srt.arg_groups.model_override_base.ResolvingConfig",
    "sglang.srt.arg_groups.model_override_base.resolving_view",
    "sglang.srt.arg_groups.model_override_base.model_config_of",
    "sglang.srt.arg_groups.overrides.record_foreign_defaults",
    "sglang.srt.arg_groups.overrides.resolution_result",
    "sglang.srt.arg_groups.pipeline.run_resolution_pipeline",
    "sglang.srt.arg_groups.platform_hook.handle_platform_defaults",
    "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.runtime_context.get_serving",
    "sglang.srt.configs.hybrid_arch.mambaish_config",
    # KV of a request, and the prefix cache.
    _BATCH + "ReqKvInfo",
    _BATCH + "ReqKvInfo.holds_kv",
    _BATCH + "ReqKvInfo.mark_kv_released",
    _BATCH + "Req.owned_kv_len",
    _BATCH + "Req.refresh_fill_ids",
    "sglang.srt.mem_cache.allocation._prefix_kv_indices",
    "sglang.srt.mem_cache.allocation.alloc_for_extend",
    "sglang.srt.mem_cache.allocation.alloc_for_decode",
    "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.get_all_free_pages",
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.get_all_free_pages",
    "sglang.srt.mem_cache.base_prefix_cache.TreeLock",
    "sglang.srt.mem_cache.base_prefix_cache.DecLockRefParams",
    "sglang.srt.mem_cache.common.checkpoint_kv_cache",
    "sglang.srt.mem_cache.common.match_kv_cache",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc_rows",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows",
    "sglang.srt.session.streaming_session.StreamingSession.try_checkpoint",
    "sglang.srt.session.streaming_session.StreamingSession.try_match_prefix",
    _TREE + "all_values_flatten",
    _TREE + "checkpoint",
    _TREE + "checkpoint_into_tree",
    _TREE + "evict",
    _TREE + "insert",
    _TREE + "lock",
    _TREE + "match_prefix",
    _TREE + "path_device_indices",
    _TREE + "root_node_handle",
    _TREE + "supports_prefix_sharing",
    _TREE + "total_size",
    _TREE + "unlock",
    # Both cores of the prefix cache. Most of the one in use is a compiled extension, which no fingerprint covers.
    _CORES + "tree_core_registry.create_tree_core",
    _CORES + "unified_tree_core.UnifiedTreeCore.match_prefix",
    _CORES + "unified_tree_core.UnifiedTreeCore.inc_lock_ref",
    _CORES + "unified_tree_core.UnifiedTreeCore.dec_lock_ref",
    _CORES + "unified_tree_core.UnifiedTreeCore.collect_full_device_indices",
    "sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore.match_prefix",
    "sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore.inc_lock_ref",
    "sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore.dec_lock_ref",
    "sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore.collect_full_device_indices",
    # The scheduler.
    "sglang.srt.beam_search.coordinator.BeamCoordinator.pending_member_rows",
    _BATCH + "NextBatchPlan",
    _SCHEDULER + "_handle_generate_request",
    _SCHEDULER + "_reqs_finishing_inflight",
    _SCHEDULER + "collect_inflight_reqs",
    _SCHEDULER + "event_loop_normal",
    _SCHEDULER + "event_loop_overlap",
    _SCHEDULER + "send_abort_output",
    _SCHEDULER + "update_running_batch",
    "sglang.srt.managers.schedule_policy.PrefillAdder._commit_prefill_admission",
    # Weights.
    "sglang.srt.utils.weight_versions.WeightVersionEvent",
    "sglang.srt.managers.io_struct.BeginWeightUpdateReqInput",
    "sglang.srt.managers.io_struct.EndWeightUpdateReqInput",
    "sglang.srt.managers.io_struct.EndWeightUpdateReqOutput",
    _CONTROL + "_weight_update_session_call",
    _WEIGHTS + "flush_cache_after_weight_update",
)
