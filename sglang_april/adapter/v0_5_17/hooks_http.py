"""The handlers of our hooks in the HTTP process (table: targets.py)."""

from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, HEALTH_CHECK_RID_PREFIX

from sglang_april.adapter.v0_5_17 import frontend

Original = Callable[..., Awaitable[Any]]


def attach_service(_result: Any, manager: Any) -> None:
    """AFTER `TokenizerManager.init_request_dispatcher`, its last step."""
    frontend.attach(manager)


async def freeze_before_pause(original: Original, manager: Any, obj: Any) -> Any:
    """AROUND `pause_generation`: stock would abort or wait for our rounds; so they freeze and step aside before it."""
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
    """AROUND `release_memory_occupation`: in the scheduler it asserts idleness, and would end the server
    (`evacuate-before-clear`).

    Raises ValueError, which SGLang's route turns into a 400. The writer lock keeps requests out that arrive meanwhile.
    """
    await manager.april.restored_state.ready()
    await _refuse_while_busy(manager)
    async with manager.model_update_lock.writer_lock:
        result = await original(manager, obj, request)
    manager.april.released |= _tags(obj)
    return result


async def resume_if_released(original: Original, manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `resume_memory_occupation`: resuming a tag twice is a KeyError in the scheduler, which ends the server."""
    released = manager.april.released
    wrong = sorted(_tags(obj) - released)
    if wrong:
        raise ValueError(f"tags: {', '.join(wrong)} cannot be resumed, because it is not released")
    released -= _tags(obj)
    return await original(manager, obj, request)


async def _refuse_while_busy(manager: Any) -> None:
    if manager.is_pause:
        # Under a pause our rounds are no readers, so a reader is a request of SGLang's own that the scheduler holds.
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
