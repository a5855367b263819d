"""The table of everything in SGLang that we hook or call (applied and verified by hooking.py).

A row says what is hooked, by what, why, where the upstream code is and when the row can go. `DEPENDS_ON` lists what we
call without hooking it. Both are compared with the reviewed manifest before the start (preflight.py).
"""

from sglang_april.adapter.hook import SOURCE, Hook
from sglang_april.adapter.v0_5_17.hook_table_scheduler import SCHEDULER_TARGETS

__all__ = ["DEPENDS_ON", "SOURCE", "TARGETS", "Hook"]

_ARGS = "sglang_april.adapter.v0_5_17.hooks_args:"
_HTTP = "sglang_april.adapter.v0_5_17.hooks_http:"

_START_TARGETS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "after",
        _ARGS + "add_flags",
        "SGLang's parser must accept and explain the --april-* flags",
        SOURCE + "server_args.py#L8214",
        "plugins can declare flags",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "before",
        _ARGS + "publish_flags",
        "flags that were not in this process's argv (a config file, a list given in code) must reach the children too",
        SOURCE + "server_args.py#L8463",
        "plugins can declare flags",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.__post_init__",
        "before",
        _ARGS + "refuse_requested",
        "a flag that we cannot serve ends the start before any work is done for it",
        SOURCE + "server_args.py#L3435",
        "the refusal list is empty",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.check_server_args",
        "before",
        _ARGS + "refuse_resolved",
        "arguments built in code before plugins were loaded, and what SGLang chose by itself, are judged too",
        SOURCE + "server_args.py#L8699",
        "the refusal list is empty",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "after",
        _ARGS + "report_hooks",
        "each scheduler tells the server process which hooks it runs with",
        SOURCE + "managers/scheduler.py#L1607",
        "SGLang's plugin loader fails closed",
    ),
    Hook(
        "sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
        "after",
        _ARGS + "require_reports",
        "a server whose schedulers run without our hooks must not start",
        SOURCE + "entrypoints/engine.py#L1688",
        "SGLang's plugin loader fails closed",
    ),
)

_HTTP_TARGETS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_request_dispatcher",
        "after",
        _HTTP + "attach_service",
        "our messages, our service and the routes under /april join the HTTP process",
        SOURCE + "managers/tokenizer_manager.py#L721",
        "plugins can add routes and message types",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation",
        "around",
        _HTTP + "freeze_first",
        "a pause must freeze our rounds; stock would abort them, or wait for their lock for ever",
        SOURCE + "managers/tokenizer_manager.py#L1974",
        "a pause is announced to the scheduler in every mode",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.continue_generation",
        "around",
        _HTTP + "thaw_after",
        "rounds go on when the pause is over",
        SOURCE + "managers/tokenizer_manager.py#L1989",
        "a pause is announced to the scheduler in every mode",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation",
        "around",
        _HTTP + "release_when_idle",
        "the scheduler asserts idleness and would die; the caller gets a 400 instead",
        SOURCE + "managers/tokenizer_control_mixin.py#L784",
        "upstream refuses instead of asserting",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.resume_memory_occupation",
        "around",
        _HTTP + "resume_what_is_released",
        "resuming what is not released is a KeyError that ends the scheduler",
        SOURCE + "managers/tokenizer_control_mixin.py#L792",
        "upstream refuses instead of raising",
    ),
)

TARGETS: tuple[Hook, ...] = (*_START_TARGETS, *_HTTP_TARGETS, *SCHEDULER_TARGETS)

DEPENDS_ON: tuple[str, ...] = (
    "sglang.srt.plugins.load_plugins",
    "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry.HookType",
    "sglang.srt.plugins.hook_registry._propagate_patch",
    "sglang.srt.plugins.hook_registry._wrap_fn",
    "sglang.srt.server_args.ServerArgs.get_model_config",
    "sglang.srt.configs.hybrid_arch.mambaish_config",
    "sglang.srt.server_args.prepare_server_args",
    "sglang.launch_server.run_server",
    "sglang.srt.utils.common.kill_process_tree",
    # The HTTP process.
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._async_dispatch_to_scheduler",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_texts",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    "sglang.srt.utils.aio_rwlock.RWLock",
    "sglang.srt.utils.auth.AuthLevel",
    "sglang.srt.utils.auth.auth_level",
    "sglang.utils.TypeBasedDispatcher",
    # Messages.
    "sglang.srt.managers.io_struct.BaseReq",
    "sglang.srt.managers.io_struct.hook_custom_types",
    "sglang.srt.managers.io_struct.sock_send",
    "sglang.srt.managers.io_struct.AbortReq",
    "sglang.srt.managers.io_struct.FlushCacheReqOutput",
    "sglang.srt.managers.io_struct.TokenizedGenerateReqInput",
    "sglang.srt.managers.io_struct.UpdateWeightFromDiskReqOutput",
    "sglang.srt.managers.io_struct.UpdateWeightsFromDistributedReqOutput",
    "sglang.srt.managers.io_struct.UpdateWeightsFromTensorReqOutput",
    "sglang.srt.managers.io_struct.UpdateWeightsFromIPCReqOutput",
    "sglang.srt.utils.network.get_local_ip_auto",
    # The scheduler's loop, its queues and batches.
    "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    "sglang.srt.managers.scheduler.Scheduler.get_num_allocatable_reqs",
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
    "sglang.srt.managers.overlap_utils.FutureMap.stash",
    "sglang.srt.managers.overlap_utils.RelayPayload",
    "sglang.srt.managers.schedule_batch.NextBatchPlan",
    "sglang.srt.managers.schedule_batch.Req.finished",
    "sglang.srt.managers.schedule_batch.Req.output_ids_through_stop",
    "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
    "sglang.srt.managers.schedule_batch.Req.seqlen",
    "sglang.srt.managers.schedule_batch.Req.set_extend_range",
    "sglang.srt.managers.schedule_batch.ReqKvInfo",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.init_new",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.merge_batch",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
    "sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
    "sglang.srt.managers.schedule_policy.PrefillAdder.rem_total_tokens",
    # KV memory.
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc",
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.free",
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.alloc",
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.free",
    "sglang.srt.mem_cache.base_prefix_cache.EvictParams",
    "sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams",
    "sglang.srt.mem_cache.common.evict_from_tree_cache",
    "sglang.srt.mem_cache.common.release_kv_cache",
    "sglang.srt.mem_cache.memory_pool.KVCache",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.write",
    "sglang.srt.mem_cache.radix_cache.RadixCache.cache_unfinished_req",
    "sglang.srt.mem_cache.radix_cache.RadixCache.dec_lock_ref",
    "sglang.srt.mem_cache.radix_cache.RadixCache.evict",
    "sglang.srt.mem_cache.radix_cache.RadixCache.inc_lock_ref",
    "sglang.srt.mem_cache.radix_cache.RadixCache.match_prefix",
    "sglang.srt.mem_cache.radix_cache.RadixKey",
    # Forwards and sampling.
    "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch",
    "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "sglang.srt.sampling.penaltylib.frequency_penalty.BatchedFrequencyPenalizer._cumulate_output_tokens",
    "sglang.srt.sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer._cumulate_output_tokens",
    "sglang.srt.sampling.penaltylib.orchestrator._BatchedPenalizer.is_prepared",
    "sglang.srt.sampling.penaltylib.presence_penalty.BatchedPresencePenalizer._cumulate_output_tokens",
    "sglang.srt.sampling.penaltylib.repetition_penalty.BatchedRepetitionPenalizer._cumulate_output_tokens",
    "sglang.srt.sampling.sampling_params.SamplingParams",
    # The CPU platform stands in for these (sglang_april/cpu).
    "sglang.srt.layers.sampler.sampling_from_probs_torch",
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
)
