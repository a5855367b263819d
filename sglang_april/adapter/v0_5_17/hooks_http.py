"""Handlers of the hooks in the HTTP process (`hook_table.py`)."""

from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, HEALTH_CHECK_RID_PREFIX

from sglang_april.adapter.v0_5_17 import frontend
from sglang_april.adapter.v0_5_17.shutdown import Shutdown

Original = Callable[..., Awaitable[Any]]


def attach_service(_result: Any, manager: Any) -> None:
    """AFTER `TokenizerManager.init_request_dispatcher`, its last step."""
    frontend.attach(manager)
    manager.april_shutdown = Shutdown(manager)


def shut_down(_original: Any, handler: Any, *_args: Any, **_kwargs: Any) -> None:
    """AROUND `SignalHandler.sigterm_handler`, called on the event loop."""
    handler.tokenizer_manager.april_shutdown.signalled()


async def skip_watchdog(_original: Original, _manager: Any) -> None:
    """AROUND `sigterm_watchdog`: `Shutdown` ends the server instead."""


async def freeze_before_pause(original: Original, manager: Any, obj: Any) -> Any:
    """AROUND `pause_generation`: SGLang would abort open rounds or wait for them, so they are frozen first."""
    async with manager.april.pausing:
        await manager.april.freeze()
        return await original(manager, obj)


async def thaw_after_continue(original: Original, manager: Any, obj: Any) -> Any:
    """AROUND `continue_generation`."""
    async with manager.april.pausing:
        result = await original(manager, obj)
        await manager.april.thaw()
        return result


async def release_when_idle(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `release_memory_occupation`: the scheduler asserts idleness, which would end the server
    (`evacuate-before-clear`). The writer lock blocks requests that arrive meanwhile.

    Raises:
        ValueError: the server is busy. SGLang's route answers 400.
    """
    await manager.april.restored_state.ready()
    await _refuse_while_busy(manager)
    async with manager.model_update_lock.writer_lock:
        result = await original(manager, obj, request)
    manager.april.released |= _tags(obj)
    return result


async def resume_if_released(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `resume_memory_occupation`: resuming a tag twice raises KeyError in the scheduler, which ends it."""
    released = manager.april.released
    wrong = sorted(_tags(obj) - released)
    if wrong:
        raise ValueError(f"tags: {', '.join(wrong)} cannot be resumed, because it is not released")
    released -= _tags(obj)
    return await original(manager, obj, request)


async def _refuse_while_busy(manager: Any) -> None:
    if manager.is_pause:
        # Paused rounds do not hold the lock, so a reader is one of SGLang's own requests.
        if await manager.model_update_lock.is_locked():
            raise ValueError("memory cannot be released: a paused request of SGLang's own is in flight")
        return
    if manager.april.rounds.open:
        ids = ", ".join(round_.id for round_ in manager.april.rounds.open)
        raise ValueError(
            f"memory cannot be released: a round is open ({ids}); pause generation or stop the round first"
        )
    if any(not rid.startswith(HEALTH_CHECK_RID_PREFIX) for rid in manager.rid_to_state):
        raise ValueError("memory cannot be released: a request of SGLang's own is in flight")


def _tags(obj: Any) -> set[str]:
    return set(obj.tags or GPU_MEMORY_ALL_TYPES)
