"""Rows of the hook table for the HTTP process (`hook_table.py`)."""

from sglang_april.adapter.hook import Hook

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
_OPENAI = "sglang.srt.entrypoints.openai."
_ENGINE = "sglang.srt.entrypoints.engine.Engine."
_TRANSPORTS = ("disk", "distributed", "tensor", "ipc")

HTTP_HOOKS: tuple[Hook, ...] = (
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
        "after",
        "hooks_http:refuse_harmful_values",
        (_TOKENIZER + "_create_tokenized_object",),
        "answers 400 for values that the scheduler cannot decode, or that do not fit into its tensors",
        "upstream validates all parameters in the HTTP process",
    ),
    Hook(
        "around",
        "hooks_attached:generate",
        (_TOKENIZER + "generate_request",),
        "requests that name a run are attached to it: no weight call waits for them, and their answers have spans",
        "upstream keeps requests through pauses and weight calls",
    ),
    Hook(
        "before",
        "hooks_attached:note_sent",
        (_TOKENIZER + "_dispatch_to_scheduler",),
        "an attached request whose client disconnects is aborted, with all its choices",
        "upstream aborts requests of clients that disconnect",
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
        "hooks_attached:describe_stream",
        (
            _OPENAI + "serving_chat.OpenAIServingChat._generate_chat_stream",
            _OPENAI + "serving_completions.OpenAIServingCompletion._generate_completion_stream",
        ),
        "the last chunk of a stream for an attached request has spans",
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
        "around",
        "hooks_http:check_weights",
        (_CONTROL + "check_weights",),
        "an open round must not hold up the weight call that replaces random weights",
        "upstream pauses its own requests before it resets weights",
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
)
