"""Work beside the event loop's handlers: two threads for tokenising and decoding, and tasks that outlive a request."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="april")
        self._tasks: set[asyncio.Task[Any]] = set()

    def in_thread(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run a function in one of the threads."""
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run in the background, with a reference that keeps the task alive."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
