"""The table of everything in SGLang that we hook or call (applied and verified by hooking.py).

A row says what is hooked, by what, why, where the upstream code is and when the row can go. `DEPENDS_ON` lists what we
call without hooking it. Both are compared with the reviewed manifest before the start (preflight.py).
"""

from dataclasses import dataclass
from typing import Literal

SOURCE = "https://github.com/sgl-project/sglang/blob/v0.5.17/python/sglang/srt/"


@dataclass(frozen=True)
class Target:
    """One hook: `handler` is `module:function`, imported when it is first called."""

    path: str
    kind: Literal["before", "after", "around"]
    handler: str
    why: str
    upstream: str
    remove_when: str


_ARGS = "sglang_april.adapter.hooks_args:"
_SCHED = "sglang_april.adapter.hooks_scheduler:"
_HTTP = "sglang_april.adapter.hooks_http:"

TARGETS: tuple[Target, ...] = (
    Target(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "after",
        _ARGS + "add_flags",
        "SGLang's parser must accept and explain the --april-* flags",
        SOURCE + "server_args.py#L8214",
        "plugins can declare flags",
    ),
    Target(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "before",
        _ARGS + "publish_flags",
        "flags that were not in this process's argv (a config file, a list given in code) must reach the children too",
        SOURCE + "server_args.py#L8463",
        "plugins can declare flags",
    ),
    Target(
        "sglang.srt.server_args.ServerArgs.__post_init__",
        "before",
        _ARGS + "refuse_requested",
        "a flag that we cannot serve ends the start before any work is done for it",
        SOURCE + "server_args.py#L3435",
        "the refusal list is empty",
    ),
    Target(
        "sglang.srt.server_args.ServerArgs.check_server_args",
        "before",
        _ARGS + "refuse_resolved",
        "arguments built in code before plugins were loaded, and what SGLang chose by itself, are judged too",
        SOURCE + "server_args.py#L8699",
        "the refusal list is empty",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "after",
        _ARGS + "report_hooks",
        "each scheduler tells the server process which hooks it runs with",
        SOURCE + "managers/scheduler.py#L1607",
        "SGLang's plugin loader fails closed",
    ),
    Target(
        "sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
        "after",
        _ARGS + "require_reports",
        "a server whose schedulers run without our hooks must not start",
        SOURCE + "entrypoints/engine.py#L1688",
        "SGLang's plugin loader fails closed",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
        "after",
        _SCHED + "attach",
        "our controller and its message type join the scheduler",
        SOURCE + "managers/scheduler.py#L1496",
        "plugins can add message types",
    ),
    Target(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        "after",
        _SCHED + "adopt_request",
        "the policy version is part of every request's cache key",
        SOURCE + "managers/schedule_batch.py#L774",
        "requests carry a weight version in their key",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        "around",
        _SCHED + "next_batch",
        "rounds end, partials give way and slots are filled at the step boundary",
        SOURCE + "managers/scheduler.py#L2925",
        "upstream has a batch quota",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        "around",
        _SCHED + "new_prefill",
        "samples on stored pages join the batch where a prefill could be launched",
        SOURCE + "managers/scheduler.py#L3067",
        "upstream has a batch quota",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        "after",
        _SCHED + "results",
        "finishes are counted as soon as a step's results are known",
        SOURCE + "managers/scheduler.py#L3814",
        "upstream has a batch quota",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "around",
        _SCHED + "keep_from_detokenizer",
        "our samples go to the HTTP process in our own message",
        SOURCE + "managers/scheduler_components/output_streamer.py#L103",
        "requests can name their reply channel",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver.session_held_tokens",
        "after",
        _SCHED + "held_tokens",
        "pages of partials are part of SGLang's own leak check",
        SOURCE + "managers/scheduler_components/pool_stats_observer.py#L179",
        "upstream keeps partials",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        "around",
        _SCHED + "queue_request",
        "a retracted request gets the current version in its key",
        SOURCE + "managers/scheduler.py#L2629",
        "requests carry a weight version in their key",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper.send_output",
        "around",
        _SCHED + "given_up",
        "aborts that bypass process_batch_result must not lose a sample",
        SOURCE + "managers/scheduler_components/output_sender.py#L12",
        "aborts go through process_batch_result",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        "around",
        _SCHED + "abort",
        "an abort of everything stops rounds, an abort by rid is never ours",
        SOURCE + "managers/scheduler.py#L4326",
        "aborts match rids exactly",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
        "around",
        _SCHED + "weight_call",
        "the version moves once per push, with our samples out of the engine",
        SOURCE + "managers/scheduler_components/weight_updater.py#L110",
        "upstream pauses its own requests around a push",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_distributed",
        "around",
        _SCHED + "weight_call",
        "the version moves once per push, with our samples out of the engine",
        SOURCE + "managers/scheduler_components/weight_updater.py#L110",
        "upstream pauses its own requests around a push",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_tensor",
        "around",
        _SCHED + "weight_call",
        "the version moves once per push, with our samples out of the engine",
        SOURCE + "managers/scheduler_components/weight_updater.py#L110",
        "upstream pauses its own requests around a push",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_ipc",
        "around",
        _SCHED + "weight_call",
        "the version moves once per push, with our samples out of the engine",
        SOURCE + "managers/scheduler_components/weight_updater.py#L110",
        "upstream pauses its own requests around a push",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper.handle",
        "around",
        _SCHED + "flush_request",
        "our samples do not stand in a flush's way",
        SOURCE + "managers/scheduler_components/flush_wrapper.py#L24",
        "upstream keeps partials",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache",
        "around",
        _SCHED + "flush",
        "pages move out before the pools are cleared",
        SOURCE + "managers/scheduler.py#L4135",
        "upstream keeps partials through a flush",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.pause_generation",
        "around",
        _SCHED + "pause",
        "a pause freezes our rounds",
        SOURCE + "managers/scheduler.py#L4465",
        "upstream has a batch quota",
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.continue_generation",
        "after",
        _SCHED + "unpause",
        "a pause ends",
        SOURCE + "managers/scheduler.py#L4554",
        "upstream has a batch quota",
    ),
    Target(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
        "around",
        _SCHED + "release_memory",
        "pages move out before the KV pool is unmapped",
        SOURCE + "managers/scheduler_components/weight_updater.py#L202",
        "upstream keeps partials through a release",
    ),
    Target(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        "after",
        _SCHED + "sampling_info",
        "seeds, and penalties of samples that come back",
        SOURCE + "sampling/sampling_batch_info.py#L87",
        "upstream replays penalties",
    ),
    Target(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_request_dispatcher",
        "after",
        _HTTP + "attach_service",
        "our messages, our service and the routes under /april join the HTTP process",
        SOURCE + "managers/tokenizer_manager.py#L721",
        "plugins can add routes and message types",
    ),
    Target(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation",
        "around",
        _HTTP + "freeze_first",
        "a pause must freeze our rounds; stock would abort them, or wait for their lock for ever",
        SOURCE + "managers/tokenizer_manager.py#L1974",
        "a pause is announced to the scheduler in every mode",
    ),
    Target(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.continue_generation",
        "around",
        _HTTP + "thaw_after",
        "rounds go on when the pause is over",
        SOURCE + "managers/tokenizer_manager.py#L1989",
        "a pause is announced to the scheduler in every mode",
    ),
    Target(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation",
        "around",
        _HTTP + "release_when_idle",
        "the scheduler asserts idleness and would die; the caller gets a 400 instead",
        SOURCE + "managers/tokenizer_control_mixin.py#L784",
        "upstream refuses instead of asserting",
    ),
    Target(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.resume_memory_occupation",
        "around",
        _HTTP + "resume_what_is_released",
        "resuming what is not released is a KeyError that ends the scheduler",
        SOURCE + "managers/tokenizer_control_mixin.py#L792",
        "upstream refuses instead of raising",
    ),
    Target(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.filter_batch",
        "after",
        _SCHED + "sampling_filter",
        "our rows keep their seeds when batches change",
        SOURCE + "sampling/sampling_batch_info.py#L350",
        "upstream seeds single rows with every backend",
    ),
    Target(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.merge_batch",
        "after",
        _SCHED + "sampling_merge",
        "our rows keep their seeds when batches change",
        SOURCE + "sampling/sampling_batch_info.py#L415",
        "upstream seeds single rows with every backend",
    ),
    Target(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward",
        "after",
        _SCHED + "sampling_copy",
        "our rows keep their seeds when batches change",
        SOURCE + "sampling/sampling_batch_info.py#L454",
        "upstream seeds single rows with every backend",
    ),
    Target(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        "around",
        _SCHED + "sample",
        "our rows are drawn by their own seeds, rows of others as ever",
        SOURCE + "layers/sampler.py#L236",
        "upstream seeds single rows with every backend",
    ),
    Target(
        "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
        "around",
        "sglang_april.adapter.v0_5_17.proximal:with_proximal",
        "a recompute returns the new policy's logprobs of the old tokens",
        SOURCE + "layers/logits_processor.py#L390",
        "upstream returns temperature-scaled input logprobs of output tokens",
    ),
)

DEPENDS_ON: tuple[str, ...] = (
    "sglang.srt.plugins.load_plugins",
    "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry._propagate_patch",
    "sglang.srt.plugins.hook_registry._wrap_fn",
    "sglang.srt.server_args.ServerArgs.get_model_config",
    "sglang.srt.configs.hybrid_arch.mambaish_config",
    "sglang.srt.server_args.prepare_server_args",
    "sglang.launch_server.run_server",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._async_dispatch_to_scheduler",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_texts",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    "sglang.srt.sampling.sampling_params.SamplingParams",
    "sglang.srt.utils.aio_rwlock.RWLock",
    "sglang.srt.utils.auth.auth_level",
    "sglang.utils.TypeBasedDispatcher",
)
