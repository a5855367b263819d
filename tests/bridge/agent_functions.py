"""Agent functions for the tests. `task.content` selects what most of them do."""

import asyncio
import contextlib
import os
import time
from typing import Any


async def length(task: Any, client: Any) -> float:
    return len(task.content) + task.index / 10


async def headers(task: Any, client: Any) -> float:
    assert client.default_headers["x-april-trajectory"].startswith(task.id)
    assert client.max_retries == 0
    return 1.0


async def behaves(task: Any, client: Any) -> Any:
    match task.content:
        case "raises":
            raise KeyError("no such tool")
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "sleeps":
            await asyncio.sleep(600)
        case "blocks":
            time.sleep(600)
        case "dies":
            os._exit(3)
        case "ignores cancellation":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(600)
        case "asks":
            await client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": task.content}], **task.sampling
            )
    return 1.0


def not_async(task: Any, client: Any) -> float:
    return 1.0
