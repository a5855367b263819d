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


async def some_turns(task: Any, client: Any) -> float:
    """One to three turns; the reward is the parity of the tokens that the model drew.

    Those of index 2 send token ids, so that each turn extends the one before it, whatever text the model draws.
    """
    if task.index == 2:
        return await _turns_in_ids(task, client)
    messages = [{"role": "user", "content": " ".join(map(str, task.content))}]
    drawn = 0
    for turn in range(1 + task.index % 3):
        reply = await client.chat.completions.create(model="default", messages=messages, **task.sampling)
        drawn += reply.usage.completion_tokens
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn} 1 2"}]
    return float(drawn % 2)


async def _turns_in_ids(task: Any, client: Any) -> float:
    run, name = (client.default_headers[f"x-april-{key}"] for key in ("run", "trajectory"))
    record = f"{str(client.base_url).removesuffix('/v1/')}/april/trajectories/{name}?run={run}"
    ids, drawn = [1 + ord(c) % 50 for c in str(task.content)], 0
    for turn in range(3):
        reply = await client.completions.create(model="default", prompt=ids, **task.sampling)
        drawn += reply.usage.completion_tokens
        (branch,) = (await client.get(record, cast_to=object))["branches"]
        ids = [*branch["ids"], turn + 1, 2]
    return float(drawn % 2)


async def fails_once(task: Any, client: Any) -> float:
    """The first attempt of a trajectory of index 1 fails after a turn."""
    reward = await some_turns(task, client)
    if task.index == 1 and client.default_headers["x-april-trajectory"].endswith("0"):
        raise KeyError("no such tool")
    return reward
