"""Handlers of the hooks in the HTTP process (`hook_table.py`)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_WEIGHTS, HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_april.adapter.core import frontend, harmful_values, hooks_attached
from sglang_april.adapter.core.request import RESERVED_RID
from sglang_april.adapter.core.shutdown import ShutdownHandler
from sglang_april.adapter.shapes.installed import shape

Original = Callable[..., Awaitable[Any]]

RELEASE_ATTEMPTS, RELEASE_RETRY_S = 10, 0.1
ANSWERED_S = 0.1
"""Far longer than Python takes to close the generator of an answered request, and with it the lock."""


def attach_service(_result: Any, manager: Any) -> None:
    """AFTER `TokenizerManager.init_request_dispatcher`, its last step."""
    frontend.attach(manager)
    manager.april_shutdown = ShutdownHandler(manager)


def shut_down(_original: Any, handler: Any, *_args: Any, **_kwargs: Any) -> None:
    """AROUND `SignalHandler.sigterm_handler`, called on the event loop."""
    handler.tokenizer_manager.april_shutdown.signalled()


async def skip_watchdog(_original: Original, _manager: Any) -> None:
    """AROUND `sigterm_watchdog`: `ShutdownHandler` ends the server instead."""


def refuse_harmful_request(original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `_init_req_state`, the first step of every generation request.

    Raises:
        ValueError: the client chose a `rid` of samples, or values that would end SGLang's scheduler. SGLang's routes
            answer 400.
    """
    rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid or []
    if any(str(rid).startswith(RESERVED_RID) for rid in rids):
        raise ValueError(f"rid: the prefix {RESERVED_RID!r} is reserved for samples of rollouts")
    ids = getattr(obj, "input_ids", None) or []
    vocab = manager.model_config.vocab_size
    for row in ids if ids and isinstance(ids[0], list) else [ids]:
        if any(not isinstance(token, int) or not 0 <= token < vocab for token in row):
            raise ValueError(f"input_ids: must be whole numbers from 0 to {vocab - 1}")
    params = getattr(obj, "sampling_params", None) or []
    for one in params if isinstance(params, list) else [params]:
        length = one.get("max_new_tokens") if isinstance(one, dict) else None
        if length is not None and not isinstance(length, int):
            raise ValueError("sampling_params.max_new_tokens: must be a whole number")
    tops = getattr(obj, "top_logprobs_num", None) or 0
    if any(not isinstance(top, int) or not 0 <= top <= vocab for top in (tops if isinstance(tops, list) else [tops])):
        raise ValueError(f"top_logprobs_num: must be a whole number from 0 to {vocab}")
    if manager.enable_metrics and (labels := getattr(obj, "custom_labels", None)):
        allowed = shape.resolved(manager.server_args).tokenizer_metrics_allowed_custom_labels
        if not isinstance(labels, dict) or not labels.keys() <= set(allowed or ()):
            raise ValueError("custom_labels: has a label that --tokenizer-metrics-allowed-custom-labels does not name")
    return original(manager, obj, *args, **kwargs)


def refuse_empty_prompt(_manager: Any, obj: Any, input_ids: Any) -> None:
    """BEFORE `_validate_one_request`, which every prompt passes once it is tokenized.

    Raises:
        ValueError: there are no tokens, or a batch of texts has one list of tokens. SGLang's routes answer 400.
    """
    if not isinstance(obj, GenerateReqInput) or input_ids is None:
        return
    if isinstance(input_ids, int):
        raise ValueError("input_ids: must be a list for each prompt of a batch")
    if not len(input_ids) and not obj.contains_mm_input():
        raise ValueError("the prompt has no tokens")


def refuse_harmful_values(tokenized: Any, manager: Any, obj: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER `_create_tokenized_object`.

    Raises:
        ValueError: the scheduler would end because of a value. SGLang's routes answer 400.
    """
    if isinstance(obj, GenerateReqInput) and (
        reason := harmful_values.problem(tokenized, manager.model_config.vocab_size)
    ):
        raise ValueError(reason)


async def freeze_before_pause(original: Original, manager: Any, obj: Any) -> Any:
    """AROUND `pause_generation`: SGLang would abort open rounds or wait for them, so they are frozen first."""
    async with manager.april.pushes.pausing, manager.april.audit.paused():
        await manager.april.pushes.freeze()
        return await hooks_attached.pause(original, manager, obj)


async def thaw_after_continue(original: Original, manager: Any, obj: Any) -> Any:
    """AROUND `continue_generation`."""
    async with manager.april.pushes.pausing:
        result = await original(manager, obj)
        await manager.april.pushes.thaw()
        return result


async def without_audit(original: Original, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `flush_cache` and `update_weights_from_*`: a request of the audit would refuse or delay them."""
    async with manager.april.audit.paused():
        return await original(manager, *args, **kwargs)


async def release_when_idle(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `release_memory_occupation`: the scheduler asserts idleness, which would end the server
    (`evacuate-before-clear`). The writer lock blocks requests that arrive meanwhile.

    Tags that are released already are left out: the memory saver ends the scheduler if it is to release one again.

    Raises:
        ValueError: a tag is unknown, which SGLang would accept, or the server is busy. SGLang's route answers 400.
    """
    tags = _tags(obj)
    mode = getattr(shape.resolved(manager.server_args), "weight_cache_mode", "off")
    if GPU_MEMORY_TYPE_WEIGHTS in tags and mode != "off":
        raise ValueError(f"tags: weights cannot be released with --weight-cache-mode {mode}, which shares their memory")
    if unknown := sorted(tags - set(GPU_MEMORY_ALL_TYPES)):
        raise ValueError(f"tags: {', '.join(unknown)} is not one of {', '.join(GPU_MEMORY_ALL_TYPES)}")
    await manager.april.restored_state.ready()
    async with manager.april.audit.paused():
        await _refuse_while_busy(manager)
        async with manager.model_update_lock.writer_lock:
            obj.tags = sorted(tags - set(await manager.april.released_memory()))
            result = await _release(original, manager, obj, request) if obj.tags else None
    manager.april.released |= tags
    return result


async def _release(original: Original, manager: Any, obj: Any, request: Any) -> Any:
    """Release memory, and check that it was released: an aborted request, or one whose client has disconnected, is no
    longer known here, and leaves the scheduler some steps later."""
    for _ in range(RELEASE_ATTEMPTS):
        result = await original(manager, obj, request)
        if _tags(obj) <= set(await manager.april.released_memory()):
            return result
        await asyncio.sleep(RELEASE_RETRY_S)
    raise ValueError("memory cannot be released: an aborted stock request is in flight")


async def resume_if_released(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `resume_memory_occupation`: resuming a tag twice raises KeyError in the scheduler, which ends it."""
    released = manager.april.released
    wrong = sorted(_tags(obj) - released)
    if wrong:
        raise ValueError(f"tags: {', '.join(wrong)} cannot be resumed, because it is not released")
    released -= _tags(obj)
    return await original(manager, obj, request)


async def check_weights(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `check_weights`: `reset_tensors` needs an idle engine, and loses the weights."""
    if obj.action != "reset_tensors":
        return await original(manager, obj, request)
    async with manager.april.audit.paused():
        result = await original(manager, obj, request)
    await manager.april.released_memory()  # which lets the next weight call pass open rounds, if the weights are lost
    return result


async def _refuse_while_busy(manager: Any) -> None:
    ids = ", ".join(manager.april.rounds.holding_ids())
    if ids and not manager.is_pause:
        raise ValueError(
            f"memory cannot be released: a round is open ({ids}); pause generation or stop the round first"
        )
    for _ in range(RELEASE_ATTEMPTS):
        checks = sum(rid.startswith(HEALTH_CHECK_RID_PREFIX) for rid in manager.rid_to_state)
        if manager.model_update_lock.stock <= checks:
            return
        await asyncio.sleep(ANSWERED_S / RELEASE_ATTEMPTS)
    raise ValueError("memory cannot be released: a stock request is in flight")


def _tags(obj: Any) -> set[str]:
    return set(obj.tags or GPU_MEMORY_ALL_TYPES)
