"""What the adapter hooks in SGLang.

`hooking.py` applies and verifies HOOKS. `preflight.py` compares every symbol that is hooked or depended on with the
reviewed manifest before the server starts. `python -m sglang_april.adapter.preflight --list` prints the rows with links
to the upstream source.
"""

from sglang_april.adapter.core.dependencies import DEPENDS_ON
from sglang_april.adapter.core.hook_table_http import HTTP_HOOKS
from sglang_april.adapter.hook import Hook

__all__ = ["DEPENDS_ON", "HOOKS"]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_COMPONENTS = "sglang.srt.managers.scheduler_components."
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker."
_ARGS = "sglang.srt.server_args.ServerArgs."
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo."
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
    *HTTP_HOOKS,
    # The scheduler loop.
    Hook(
        "after",
        "hooks_scheduler:attach",
        (_SCHEDULER + "init_request_dispatcher",),
        "adds the controller and its message type to the scheduler",
        "plugins can add message types",
    ),
    Hook(
        "around",
        "hooks_scheduler:run_event_loop",
        (_SCHEDULER + "run_event_loop",),
        "a forward that fails because ranks run different batches ends with that reason",
        "upstream compares the batches of its ranks",
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
        "samples with stored KV join the batch where a prefill could be launched; legs take over the previous leg's KV",
        "upstream has a batch quota",
    ),
    Hook(
        "after",
        "hooks_legs:use_kv",
        ("sglang.srt.managers.schedule_batch.Req.init_next_round_input",),
        "the KV of the previous leg is the prefix of a leg, also under another policy version",
        "upstream keeps KV between the turns of an agent over weight updates",
    ),
    Hook(
        "around",
        "hooks_legs:add_to_prefill",
        ("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",),
        "a leg with ignore_eos is prefilled in chunks behind the KV of the previous leg also without a radix tree",
        "upstream admits requests with ignore_eos like others",
    ),
    Hook(
        "after",
        "hooks_legs:next_chunk",
        (_SCHEDULER + "stash_chunked_request",),
        "a prefill in chunks continues although its KV does not enter the radix tree",
        "upstream prefills in chunks without the radix tree",
    ),
    Hook(
        "around",
        "hooks_legs:keep_kv",
        ("sglang.srt.mem_cache.common.release_kv_cache",),
        "a leg that finishes keeps its KV for the next one",
        "upstream keeps KV between the turns of an agent over weight updates",
    ),
    Hook(
        "around",
        "hooks_scheduler:sleep_on_idle",
        (_SCHEDULER + "maybe_sleep_on_idle",),
        "an idle loop must not sleep while a sample can start",
        "upstream has a batch quota",
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
    Hook(
        "around",
        "hooks_control:check_weights",
        (_WEIGHTS + "check_weights",),
        "no sample takes a step on weights that were replaced by random values",
        "upstream pauses its own requests before it resets weights",
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
