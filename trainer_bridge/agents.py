"""Agent functions in worker processes: many at the same time in the event loop of each worker.

An agent is an async function `(task, client) -> reward`. `task` is an `AgentTask`, `client` an `openai.AsyncOpenAI`
whose requests carry the headers of the task's trajectory (docs/trajectories.md). The trainer's side is
`agent_runner.py`.

The worker processes import this module, so it must not import anything heavy.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from trainer_bridge.rewards import load_function

CONNECT_TIMEOUT_S = 30.0
"""Connect timeout of the agents' requests. Answers have no time limit, because a request may be suspended."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent function works on: one trajectory of a prompt."""

    id: str
    """`<prompt id>.<index>`: the same in every attempt, and in every run with the same data."""
    index: int
    """Index of the trajectory in its group, 0 to n − 1."""
    content: Any
    """The prompt as the data has it: text, messages or token ids."""
    label: Any
    metadata: Any
    sampling: dict[str, Any]
    """Keyword arguments for `client.chat.completions.create`: temperature, max_tokens, seed and whatever else
    the configuration sets. The trainer's ratios are right only if requests use this temperature."""


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Starts the agent of a trajectory."""

    id: str
    """Its name at the engine."""
    task: AgentTask
    headers: dict[str, str]
    """Headers of its requests."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancels the agent of a trajectory; `AgentFinished` confirms it."""

    id: str


@dataclass(frozen=True, slots=True)
class AgentFinished:
    """The end of an agent: its reward, or why it has none."""

    id: str
    reward: float | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has imported the function, or why it has not."""

    problem: str = ""


def serve(connection: Connection, path: str, url: str, api_key: str | None) -> None:
    """Main function of a worker: runs the trajectories that it receives until the connection closes."""
    try:
        function = load_function(path)
        import openai  # noqa: F401 - its absence is reported here
    except Exception as error:  # noqa: BLE001 - sent to the trainer, which ends the run
        connection.send(Ready(f"{path}: {error!r}"))
        return
    connection.send(Ready())
    asyncio.run(_serve(connection, function, url, api_key))


async def _serve(connection: Connection, function: Callable[..., Awaitable[Any]], url: str, key: str | None) -> None:
    running: dict[str, asyncio.Task[None]] = {}
    closed, loop = asyncio.Event(), asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(_client(url, key))

        async def run(start: StartAgent) -> None:
            own = client.with_options(default_headers=start.headers)
            try:
                finished = AgentFinished(start.id, _finite(await function(start.task, own)))
            except asyncio.CancelledError:
                finished = AgentFinished(start.id, None, "cancelled")
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                finished = AgentFinished(start.id, None, _described(error))
            running.pop(start.id, None)
            connection.send(finished)

        def receive() -> None:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                loop.remove_reader(connection.fileno())
                closed.set()
                return
            if isinstance(message, StartAgent):
                running[message.id] = loop.create_task(run(message), name=message.id)
            elif (task := running.get(message.id)) is not None:
                task.cancel()

        loop.add_reader(connection.fileno(), receive)
        await closed.wait()
        for task in running.values():
            task.cancel()


def _client(url: str, api_key: str | None) -> Any:
    """An `openai.AsyncOpenAI` without limits on time and connections.

    It repeats nothing: a request that was sent twice would be two legs of its trajectory. So no connection is used
    twice either: the server closes idle ones, and a request on one that is just being closed is lost.
    """
    import httpx
    import openai

    from sglang_april.client.keep_alive import with_keep_alive

    options = {"limits": httpx.Limits(max_connections=None, max_keepalive_connections=0)}
    transport = with_keep_alive(httpx.AsyncHTTPTransport, url, options)
    http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S), **transport)
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=api_key or "none", http_client=http, max_retries=0, timeout=http.timeout
    )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number


def _described(error: BaseException) -> str:
    """The error and the line of the agent's code that raised it."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    place = frames[1] if len(frames) > 1 else "the agent function"  # frame 0 is `run` above
    cause = f", caused by {error.__cause__!r}" if error.__cause__ is not None else ""
    return f"{error!r}{cause} at {place}"
