"""What the adapter hooks in SGLang 0.5.17.

`hooking.py` applies and verifies HOOKS. `preflight.py` compares every symbol that is hooked or depended on with the
reviewed manifest before the server starts. `python -m sglang_april.adapter.preflight --list` prints the rows with links
to the upstream source.
"""

from sglang_april.adapter.hook import Hook
from sglang_april.adapter.v0_5_17.dependencies import DEPENDS_ON

__all__ = ["DEPENDS_ON", "HOOKS"]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_COMPONENTS = "sglang.srt.managers.scheduler_components."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
_ENGINE = "sglang.srt.entrypoints.engine.Engine."
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker."
_ARGS = "sglang.srt.server_args.ServerArgs."
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo."
_OPENAI = "sglang.srt.entrypoints.openai."
_WEIGHTS = _COMPONENTS + "weight_updater.SchedulerWeightUpdaterManager."
_TRANSPORTS = ("disk", "distributed", "tensor", "ipc")

HOOKS: tuple[Hook, ...] = (
    # The start: flags and refusals.
    Hook(
        "after",
        "hooks_args:add_flags",
        (_ARGS + "add_cli_args",),
        "SGLang's parser accepts and documents the --april-* flags",
        "plugins can declare flags",
    ),
    Hook(
        "before",
        "hooks_args:publish_flags",
        (_ARGS + "from_cli_args",),
        "flags that are not in this process's argv (config file, list built in code) reach child processes",
        "plugins can declare flags",
    ),
    Hook(
        "before",
        "hooks_args:refuse_requested",
        (_ARGS + "__post_init__",),
        "an unsupported flag ends the start before any work is done",
        "the refusal list is empty",
    ),
    Hook(
        "before",
        "hooks_args:refuse_resolved",
        (_ARGS + "check_server_args",),
        "also checks arguments built in code before plugins were loaded, and SGLang's own choices",
        "the refusal list is empty",
    ),
    Hook(
        "after",
        "hooks_args:report_hooks",
        (_SCHEDULER + "get_init_info",),
        "each scheduler reports its verified hooks to the server process",
        "SGLang's plugin loader fails closed",
    ),
    Hook(
        "after",
        "hooks_args:require_reports",
        ("sglang.srt.entrypoints.engine._wait_for_scheduler_ready",),
        "a server whose schedulers run without the hooks must not start",
        "SGLang's plugin loader fails closed",
    ),
    # The HTTP process.
    Hook(
        "after",
        "hooks_http:attach_service",
        (_TOKENIZER + "init_request_dispatcher",),
        "adds the /april routes, the service and its message types to the HTTP process",
        "plugins can add routes and message types",
    ),
    Hook(
        "around",
        "hooks_http:refuse_harmful_request",
        (_TOKENIZER + "_init_req_state",),
        "answers 400 for a rid of samples, and for values with which one request would end the scheduler",
        "samples have no rid of SGLang's, and upstream validates token ids and lengths",
    ),
    Hook(
        "before",
        "hooks_http:refuse_empty_prompt",
        (_TOKENIZER + "_validate_one_request",),
        "answers 400 for a prompt without tokens, whose prefill would end the scheduler",
        "upstream refuses prompts without tokens on every path",
    ),
    Hook(
        "around",
        "hooks_attached:generate",
        (_TOKENIZER + "generate_request",),
        "requests that name a run are attached to it: no weight call waits for them, and their answers have spans",
        "upstream keeps requests through pauses and weight calls",
    ),
    Hook(
        "around",
        "hooks_attached:abort",
        (_TOKENIZER + "abort_request",),
        "a pause of mode abort spares attached requests",
        "upstream keeps requests through pauses and weight calls",
    ),
    Hook(
        "after",
        "hooks_attached:describe_response",
        (
            _OPENAI + "serving_chat.OpenAIServingChat._build_chat_response",
            _OPENAI + "serving_completions.OpenAIServingCompletion._build_completion_response",
        ),
        "responses to attached requests have spans",
        "upstream returns meta_info in OpenAI's responses",
    ),
    Hook(
        "around",
        "hooks_http:freeze_before_pause",
        (_TOKENIZER + "pause_generation",),
        "a pause freezes open rounds; SGLang would abort them, or wait for their lock forever",
        "a pause is announced to the scheduler in every mode",
    ),
    Hook(
        "around",
        "hooks_http:thaw_after_continue",
        (_TOKENIZER + "continue_generation",),
        "rounds continue when the pause ends",
        "a pause is announced to the scheduler in every mode",
    ),
    Hook(
        "around",
        "hooks_http:release_when_idle",
        (_CONTROL + "release_memory_occupation",),
        "answers 400 where the scheduler would fail its idleness assertion and exit",
        "upstream refuses instead of asserting",
    ),
    Hook(
        "around",
        "hooks_http:resume_if_released",
        (_CONTROL + "resume_memory_occupation",),
        "answers 400 where resuming memory that is not released would raise KeyError in the scheduler",
        "upstream refuses instead of raising",
    ),
    Hook(
        "before",
        "hooks_interrupt:handle",
        ("sglang.srt.entrypoints.http_server.launch_server",),
        "Ctrl-C during the start ends the server with one line",
        "upstream ends without tracebacks",
    ),
    Hook(
        "around",
        "hooks_interrupt:start_processes",
        (_ENGINE + "_launch_scheduler_processes", _ENGINE + "_launch_detokenizer_subprocesses"),
        "Ctrl-C in a terminal reaches all processes, and those that serve must outlive it until the server has stored",
        "upstream's processes ignore SIGINT",
    ),
    Hook(
        "after",
        "hooks_interrupt:handle_while_serving",
        (_TOKENIZER + "auto_create_handle_loop",),
        "Ctrl-C ends the server as SIGTERM does, with one line",
        "upstream keeps partials",
    ),
    Hook(
        "around",
        "hooks_http:shut_down",
        ("sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler",),
        "SIGTERM stores partials and ends the server within a time limit",
        "upstream keeps partials",
    ),
    Hook(
        "around",
        "hooks_http:skip_watchdog",
        (_TOKENIZER + "sigterm_watchdog",),
        "SGLang's own end would kill the schedulers while they store partials",
        "upstream keeps partials",
    ),
    Hook(
        "around",
        "hooks_http:without_audit",
        (
            _TOKENIZER + "update_weights_from_disk",
            *(_CONTROL + "update_weights_from_" + transport for transport in _TRANSPORTS[1:]),
            _CONTROL + "flush_cache",
        ),
        "a request of the audit must not make a weight call wait or a flush fail",
        "upstream rescores samples itself",
    ),
    # The scheduler loop.
    Hook(
        "after",
        "hooks_scheduler:attach",
        (_SCHEDULER + "init_request_dispatcher",),
        "adds the controller and its message type to the scheduler",
        "plugins can add message types",
    ),
    Hook(
        "after",
        "hooks_scheduler:adopt_request",
        ("sglang.srt.managers.schedule_batch.Req.__init__",),
        "the policy version becomes part of every request's cache key",
        "requests carry a weight version in their key",
    ),
    Hook(
        "around",
        "attached:begin_attached",
        (_SCHEDULER + "handle_generate_request",),
        "a request that names a run can be suspended and resumed like a sample",
        "upstream keeps requests through pauses and weight calls",
    ),
    Hook(
        "around",
        "hooks_scheduler:next_batch",
        (_SCHEDULER + "get_next_batch_to_run",),
        "at the step boundary rounds end, partials yield memory and free slots are filled",
        "upstream has a batch quota",
    ),
    Hook(
        "around",
        "hooks_scheduler:resume_or_prefill",
        (_SCHEDULER + "get_new_batch_prefill",),
        "samples with stored KV join the batch where a prefill could be launched",
        "upstream has a batch quota",
    ),
    Hook(
        "around",
        "hooks_scheduler:sleep_on_idle",
        (_SCHEDULER + "maybe_sleep_on_idle",),
        "an idle loop must not sleep while a sample can start",
        "upstream has a batch quota",
    ),
    Hook(
        "around",
        "hooks_scheduler:run_batch",
        (_SCHEDULER + "run_batch",),
        "a forward that fails because ranks run different batches ends with that reason",
        "upstream compares the batches of its ranks",
    ),
    Hook(
        "after",
        "hooks_scheduler:count_finishes",
        (_SCHEDULER + "process_batch_result",),
        "finished samples are counted as soon as a step's results are known",
        "upstream has a batch quota",
    ),
    Hook(
        "around",
        "hooks_scheduler:divert_outputs",
        (_COMPONENTS + "output_streamer.SchedulerOutputStreamer.stream_output",),
        "outputs of samples go to the HTTP process in their own message, not to the detokenizer",
        "requests can name their reply channel",
    ),
    Hook(
        "after",
        "hooks_scheduler:add_held_tokens",
        (_COMPONENTS + "pool_stats_observer.SchedulerPoolStatsObserver.session_held_tokens",),
        "SGLang's leak check counts the pages of partials",
        "upstream keeps partials",
    ),
    Hook(
        "around",
        "hooks_scheduler:renew_cache_key",
        (_SCHEDULER + "_add_request_to_queue",),
        "a retracted request gets the current policy version in its cache key",
        "requests carry a weight version in their key",
    ),
    Hook(
        "around",
        "hooks_scheduler:intercept_queue_abort",
        (_COMPONENTS + "output_sender.SenderWrapper.send_output",),
        "aborts that bypass process_batch_result must not lose a sample",
        "aborts go through process_batch_result",
    ),
    Hook(
        "after",
        "hooks_scheduler:close_journal",
        (_SCHEDULER + "handle_shutdown",),
        "the journal is complete when the process ends",
        "upstream keeps partials",
    ),
    # Interruptions of a round.
    Hook(
        "around",
        "hooks_control:abort",
        (_SCHEDULER + "abort_request",),
        "an abort of everything stops rounds; an abort by rid never affects samples",
        "aborts match rids exactly",
    ),
    Hook(
        "around",
        "hooks_control:weight_call",
        tuple(_WEIGHTS + "update_weights_from_" + transport for transport in _TRANSPORTS),
        "the version moves once per push, while samples are out of the engine",
        "upstream pauses its own requests around a push",
    ),
    Hook(
        "around",
        "hooks_control:load_weights",
        tuple(_WORKER + "update_weights_from_" + transport for transport in _TRANSPORTS),
        "weights that fail to load on one rank fail on all ranks, and the server keeps running",
        "upstream combines the outcome over the ranks",
    ),
    Hook(
        "around",
        "hooks_control:flush_request",
        (_COMPONENTS + "flush_wrapper.SchedulerFlushWrapper.handle",),
        "samples do not hold up a flush",
        "upstream keeps partials",
    ),
    Hook(
        "around",
        "hooks_control:flush",
        (_SCHEDULER + "flush_cache",),
        "pages are evacuated before the pools are cleared",
        "upstream keeps partials through a flush",
    ),
    Hook(
        "around",
        "hooks_control:pause",
        (_SCHEDULER + "pause_generation",),
        "a pause freezes open rounds",
        "upstream has a batch quota",
    ),
    Hook(
        "after",
        "hooks_control:thaw",
        (_SCHEDULER + "continue_generation",),
        "the end of a pause thaws them",
        "upstream has a batch quota",
    ),
    Hook(
        "around",
        "hooks_control:release_memory",
        (_WEIGHTS + "release_memory_occupation",),
        "pages are evacuated before the KV pool is unmapped",
        "upstream keeps partials through a release",
    ),
    # Sampling and logprobs.
    Hook(
        "after",
        "hooks_sampling:sampling_info",
        (_SAMPLING + "from_schedule_batch",),
        "sets per-row seeds, and restores penalties of resumed samples",
        "upstream replays penalties",
    ),
    Hook(
        "after",
        "hooks_sampling:sampling_filter",
        (_SAMPLING + "filter_batch",),
        "seeded rows keep their seeds when batches change",
        "upstream seeds single rows with every backend",
    ),
    Hook(
        "after",
        "hooks_sampling:sampling_merge",
        (_SAMPLING + "merge_batch",),
        "seeded rows keep their seeds when batches change",
        "upstream seeds single rows with every backend",
    ),
    Hook(
        "after",
        "hooks_sampling:sampling_copy",
        (_SAMPLING + "copy_for_forward",),
        "seeded rows keep their seeds when batches change",
        "upstream seeds single rows with every backend",
    ),
    Hook(
        "around",
        "hooks_sampling:sample",
        ("sglang.srt.layers.sampler.Sampler._sample_from_probs",),
        "seeded rows are sampled with their own seeds, other rows by SGLang",
        "upstream seeds single rows with every backend",
    ),
    Hook(
        "around",
        "hooks_sampling:sync_tokens",
        ("sglang.srt.layers.sampler.Sampler._sync_token_ids_across_tp",),
        "skips the token collective when there is only one rank",
        "upstream skips the collective of one rank",
    ),
    Hook(
        "around",
        "proximal:with_proximal",
        ("sglang.srt.layers.logits_processor.LogitsProcessor.forward",),
        "a recompute returns the new policy's logprobs of the old tokens",
        "upstream returns temperature-scaled input logprobs of output tokens",
    ),
    Hook(
        "after",
        "proximal:prefix_limit",
        ("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",),
        "old tokens whose logprobs are requested are computed even if the radix tree holds their KV",
        "upstream returns temperature-scaled input logprobs of output tokens",
    ),
)
"""Every function that is hooked."""
