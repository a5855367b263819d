"""The review of every argument of SGLang 0.5.15.post1 to 0.5.18 and 0.5.23 (the fields of ServerArgs): which values
are supported, and why. A release need not have all of them."""

from typing import Any

from sglang_april import config
from sglang_april.adapter.refusals import Rule, accept, accept_only, refuse, refuse_if


def _at_most_one(value: Any, _: Any) -> bool:
    return (value or 1) <= 1


def _preempts_on_one_rank(value: Any, args: Any) -> bool:
    return not value or args.tp_size <= 1 or bool(getattr(args, "disable_priority_preemption", False))


def _without_default_run(value: Any, _: Any) -> bool:
    return not value or config.load().attach is None


def _without_priorities(_value: Any, args: Any) -> bool:
    return not args.enable_priority_scheduling


BY_TOKENS = "such a cache looks KV up by token ids alone, and could return KV of another policy version"
SESSIONS = "requests of a session share KV, and a suspend stores the KV of one sample"
DELAYED = "its rules for delaying prefills ignore samples that are about to resume"
DP_ATTENTION = "rounds are not divided among the ranks of data-parallel attention"
CONTEXT = "a partial's KV would be spread over the ranks of a context"
NO_HTTP = "a server without SGLang's HTTP front end has no rollout routes"
DRAFTS = "a suspend does not keep the state of the draft model"
EXTRA_STATE = "a suspend does not keep the extra state of this feature"
REFUSED_FEATURE = "it concerns only a feature that is itself refused"
REFUSED_MODEL = "it concerns only models that are themselves refused"
PROCESS = "it concerns the process and its device"
LOGGING = "it only affects logging, metrics and tracing"
ROUTES = "it concerns SGLang's own routes and the encoding of requests and replies"

ARGUMENTS: tuple[Rule, ...] = (
    accept(
        """model_path tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init load_format
        model_loader_extra_config trust_remote_code context_length revision weight_version model_config_parser
        json_model_override_args download_dir model_checksum delete_ckpt_after_loading decrypted_config_file
        checkpoint_engine_wait_weights_before_ready custom_weight_loader weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config weight_cache_mode weight_cache_socket weight_cache_timeout gated_launch_port""",
        "it chooses the model and tokenizer, and how they are loaded",
    ),
    accept_only("model_impl", ("auto", "sglang", "transformers"), "the model runner of MindSpore bypasses the hooks"),
    accept(
        """dtype quantization quantization_param_path modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile
        enable_fp32_lm_head enable_tf32_matmul torchao_config""",
        "it changes the model's numerics, and logprobs are those of the model that draws the tokens",
    ),
    accept_only(
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3"),
        "the pool keeps scales beside the KV, which the page store does not copy",
    ),
    accept(
        """mem_fraction_static max_running_requests max_total_tokens chunked_prefill_size
        max_prefill_tokens prefill_max_requests schedule_conservativeness page_size swa_full_tokens_ratio
        disable_hybrid_swa_memory disable_chunked_prefix_cache num_continuous_decode_steps
        scheduler_recv_interval stream_interval sleep_on_idle""",
        "it sets the sizes of the pool and of batches, which the plugin reads from the scheduler",
    ),
    refuse_if(
        "max_queued_requests",
        _without_priorities,
        "with `--enable-priority-scheduling`",
        "a request of higher priority would end a sample that waits in a full queue",
    ),
    accept_only(
        "schedule_policy", ("fcfs", "lpm"), "this order of waiting requests has not been reviewed for rollout samples"
    ),
    refuse_if(
        "enable_priority_scheduling",
        _preempts_on_one_rank,
        "with `--tp-size` above 1, unless `--disable-priority-preemption` is given",
        "each rank orders the requests that it preempts by its own clock, so that the ranks' batches may differ",
    ),
    accept(
        """disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy radix_eviction_policy
        _radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_radix_cache
        disable_overlap_schedule""",
        "samples have priorities, survive retraction, and run in both scheduler loops",
    ),
    refuse("enable_mixed_chunk", "rollout samples must not decode in a batch that also prefills"),
    refuse("enable_prefill_delayer min_free_slots_delay", DELAYED),
    refuse_if("prefill_decode_interval", lambda value, _: not value, "above 0", DELAYED),
    refuse("prefill_only_disable_kv_cache enable_mis is_embedding encoder_only", "such a server generates nothing"),
    refuse("enable_page_major_kv_layout", "the page store reads layer-major pools only"),
    refuse("enable_unified_memory", "the page store cannot copy from a buffer that several pools share"),
    refuse("enable_session_radix_cache enable_streaming_session", SESSIONS),
    refuse("radix_cache_backend enable_lmcache enable_flexkv enable_unified_cache_external_linker", BY_TOKENS),
    refuse(
        "enable_hierarchical_cache",
        "its host copies of cached prefixes have not been tested beside those of the page store",
    ),
    refuse("enable_hisparse", "it spreads a request's KV over device and host"),
    refuse("kv_canary kv_canary_real_data", "its records of the pool's contents do not cover restored pages"),
    refuse_if(
        "dp_size", _at_most_one, "above 1", "SGLang's data-parallel controller sends each round to every replica"
    ),
    refuse("enable_dp_attention", DP_ATTENTION),
    refuse_if("attn_dp_size", _at_most_one, "above 1", DP_ATTENTION),
    refuse_if("pp_size", _at_most_one, "above 1", "a suspend does not reach the micro-batches in flight"),
    refuse_if("dcp_size attn_cp_size", _at_most_one, "above 1", CONTEXT),
    refuse(
        """enable_prefill_cp enable_dsa_cache_layer_split enable_dsa_prefill_context_parallel
        enable_prefill_context_parallel enable_cp_decode_attn_tp enable_cp_tp_group_sharing enable_kv_cache_sharding""",
        CONTEXT,
    ),
    refuse_if("moe_dp_size dwdp_size", _at_most_one, "above 1", "rounds are not divided among data-parallel ranks"),
    refuse(
        """elastic_ep_backend enable_elastic_expert_backup ep_join_mode ep_join_rank_offset elastic_ep_rejoin
        elastic_ep_initial_size max_ep_size""",
        "a rank that joins or leaves does not have the state of the other ranks",
    ),
    refuse("enable_two_batch_overlap", "it splits batches in two, which the hooks on batch rows do not support"),
    refuse_if(
        "tokenizer_worker_num", _at_most_one, "above 1", "extra HTTP workers do not load plugins or rollout routes"
    ),
    refuse("smg_grpc_mode grpc_mode", NO_HTTP),
    refuse("enable_http2", "the rollout routes have been tested only on SGLang's default HTTP server"),
    refuse("strip_thinking_cache", "it has not been tested with the KV of suspended samples"),
    refuse(
        "disaggregation_mode enable_pd_role_switch language_only enable_adaptive_dispatch_to_encoder",
        "a partial's KV would have to move between servers",
    ),
    refuse("enable_pdmux", "its event loop bypasses the hooks"),
    refuse("speculative_algorithm", DRAFTS),
    refuse_if("decoupled_spec_role", lambda value, _: value == "null", "any role", DRAFTS),
    refuse("dllm_algorithm", "a diffusion model does not draw tokens one after another"),
    refuse("startup_weight_load_mode", "the plugin measures forwards during the start, which requires loaded weights"),
    refuse("enable_watermark", "a watermark changes the distribution that tokens are drawn from"),
    refuse(
        "enable_nvidia_megakernel enable_amd_monokernel",
        "these kernels replace whole decode steps, and have not been tested with the hooks on sampling",
    ),
    refuse("use_ray", "the hooks have not been tested in schedulers that Ray starts"),
    refuse(
        "rl_on_policy_target",
        "it changes how logprobs are computed; behaviour logprobs must be those of the policy that drew the token",
    ),
    refuse(
        """enable_int8_mamba_checkpoint enable_linear_replayssm enable_linear_replayssm_spec
        enable_gdn_replayssm_spec""",
        EXTRA_STATE,
    ),
    accept(
        """pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking load_balance_method dcp_comm_backend
        dcp_replicate_q_proj cp_strategy dsa_prefill_cp_mode prefill_cp_mode
        enable_dp_attention_local_control_broadcast enable_dp_lm_head elastic_ep_scale_timeout
        tbo_token_distribution_threshold prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
        hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
        hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hisparse_config lmcache_config_file flexkv_config_file kv_canary_sweep_interval
        dllm_algorithm_config dllm_fdfo pdmux_config_path sm_group_num decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank disaggregation_transfer_backend
        disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache num_reserved_decode_tokens
        disaggregation_decode_extra_slots disaggregation_decode_polling_interval optimistic_prefill_attempts
        optimistic_prefill_retries
        encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        decrypted_draft_config_file enable_draft_weights_cpu_backup enable_multi_layer_eagle
        speculative_draft_model_path speculative_draft_model_revision speculative_draft_load_format
        speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
        speculative_dflash_block_size speculative_dspark_block_size speculative_dspark_sps_table_path
        speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_accept_threshold_single speculative_accept_threshold_acc
        speculative_use_rejection_sampling speculative_token_map speculative_attention_mode
        speculative_draft_attention_backend speculative_draft_window_size speculative_moe_runner_backend
        speculative_moe_a2a_backend speculative_draft_model_quantization speculative_skip_dp_mlp_sync
        speculative_adaptive speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
        speculative_ngram_capacity speculative_ngram_external_corpus_path
        speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens
        speculative_draft_kv_cache_dtype _speculative_draft_quantization_explicitly_set
        disaggregation_decode_retraction_backup enable_tp_lm_head_all_to_all http2_max_concurrent_streams
        http2_initial_connection_window_size prefill_decode_interval_min_bs mlx_enable_sampling
        disaggregation_decode_allocation_policy
        disaggregation_enable_kv_checksum disaggregation_decode_host_receive_threshold watermark_config
        watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
        watermark_max_probability watermark_default_enabled watermark_enforce_all hicache_host_memory_mode
        hicache_host_memory_fraction hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup enable_dense_mlp_attn_tp
        grpc_response_timeout_secs grpc_worker_threads enable_http_worker_reuseport uno_lora_path
        speculative_boundary_reduction speculative_domino_candidate_pool_size
        speculative_use_block_verification speculative_dsa_topk_backend speculative_draft_sink_size
        speculative_enable_w4a4_mxfp4_megamoe""",
        REFUSED_FEATURE,
    ),
    accept(
        """max_mamba_cache_size mamba_full_memory_ratio mamba_backend mamba_ssm_dtype mamba_max_states_per_path
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds mamba_radix_cache_strategy
        uses_mamba_radix_cache mamba_track_interval int8_mamba_ckpt_size linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        linear_replayssm_cache_len dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend
        dsa_topk_backend enable_deepseek_v4_fp4_indexer c128_page_size dsv4_prefill_backend dsv4_attn_backend
        dsa_triton_union enable_dsa_fused_indexer enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay ple_offload_embedding ple_offload_backend ple_offload_dir
        qsa_indexer_dtype swa_prefix_tails _swa_full_tokens_ratio_explicitly_set""",
        REFUSED_MODEL,
    ),
    accept(
        """nccl_port dist_timeout dist_init_addr nnodes node_rank tp_size ep_size moe_dense_tp_size
        enable_attn_tp_input_scattered disable_attn_tp_gather enable_p2p_check enable_layerwise_nvtx_marker
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
        enable_scattered_sconv pre_warm_nccl enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
        enable_aiter_allreduce_fusion enable_single_batch_overlap boundary_reduction
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
        enable_shared_experts_attn_tp shared_experts_tp_size enable_layernorm_sp
        enable_megamoe_for_layernorm_sp""",
        "it chooses how tensor- and expert-parallel ranks communicate within a forward",
    ),
    accept(
        """enable_fused_moe_sum_all_reduce moe_a2a_backend moe_runner_backend flashinfer_mxfp4_moe_precision
        deepep_mode fuseep_mode deepep_dispatcher_output_dtype ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        enable_expert_distribution_metrics deepep_config mooncake_ib_device enable_waterfill enable_deepep_waterfill
        disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion kt_weight_path kt_method kt_cpuinfer kt_threadpool_count
        kt_num_gpu_experts kt_max_deferred_experts_per_token cpu_offload_gb offload_group_size
        offload_num_in_group offload_prefetch_step offload_mode enable_w4a4_mxfp4_megamoe deepep_v2_mode
        flashinfer_a2a_dispatch_type enable_paged_experts paged_experts_num_resident""",
        "it chooses where a layer's weights are and which kernels compute it",
    ),
    accept_only("sampling_backend", ("flashinfer", "pytorch"), "this sampler has not been tested with seeded rows"),
    accept(
        """attention_backend decode_attention_backend prefill_attention_backend grammar_backend
        fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune
        flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size flashinfer_mla_disable_ragged enable_fused_qk_norm_rope
        enable_precise_embedding_interpolation enable_deterministic_inference cuda_graph_config
        cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
        cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_tc_compiler
        disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
        enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph enable_torch_compile
        enable_torch_compile_debug_mode torch_compile_max_bs enable_lean_attention
        prefill_kv_cache_dequant_dtype cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context""",
        "it chooses kernels and graphs; the KV pools that some of them need are checked by class",
    ),
    accept(
        """enable_memory_saver enable_weights_cpu_backup disable_outlines_disk_cache
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt""",
        "partials are evacuated before the pool is released, and grammars are SGLang's own",
    ),
    refuse(
        "enable_lora lora_paths",
        "samples join a running batch, where SGLang does not count its adapters, and could be drawn with another's",
    ),
    accept(
        """enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode
        enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
        sampling_mask_max_tokens
        enable_return_routed_experts enable_return_indexer_topk enable_lora_overlap_loading
        max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch
        lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras
        lora_use_virtual_experts lora_strict_loading lora_drain_wait_threshold enable_multimodal
        mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder
        mm_process_config mm_processor_worker_num mm_io_worker_num limit_mm_data_per_request
        enable_mm_global_cache disable_fast_image_processor mm_feature_transport keep_mm_feature_on_device
        language_model_only allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb
        trust_mm_content_hashes image_processor_backend mm_global_cache_backend""",
        "it affects only requests that use it, and rollouts that use it are refused with 400",
    ),
    accept(
        """device base_gpu_id gpu_id_step random_seed watchdog_timeout soft_watchdog_timeout
        custom_sigquit_handler numa_node gc_threshold""",
        PROCESS,
    ),
    accept(
        """log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics
        smg_http_sidecar_port grpc_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
        enable_request_time_stats_logging kv_events_config enable_forward_pass_metrics
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules
        otlp_traces_endpoint otlp_service_name load_publish_endpoint export_metrics_to_file
        export_metrics_to_file_dir stat_loggers
        expert_balancedness_report_mode debug_tensor_dump_output_folder
        debug_tensor_dump_layers debug_tensor_dump_input_file forward_hooks
        msprobe_dump_config""",
        LOGGING,
    ),
    refuse_if(
        "warmups",
        _without_default_run,
        "with `--april-attach`",
        "its requests would be attached to the run, and could wait for weights before the server serves",
    ),
    accept(
        """host port fastapi_root_path grpc_port sidecar sidecar_args detokenizer_worker_num skip_server_warmup
        ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        served_model_name chat_template hf_chat_template_name completion_template
        file_storage_path enable_cache_report reasoning_parser default_chat_template_kwargs
        enable_strict_thinking tool_call_parser tool_server sampling_defaults asr_max_buffer_seconds
        asr_max_concurrent_sessions preferred_sampling_params allow_auto_truncate
        batch_notify_size stream_response_default_include_usage incremental_streaming_output
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
        enable_response_store trust_request_chat_template return_input_ids return_output_ids""",
        ROUTES,
    ),
)
