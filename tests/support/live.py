"""A live server, the weights of each of its policy versions, and requests in background threads."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.oracle import Oracle, ReplayResult
from tests.support.server import Server

TIMEOUT_S = 120.0
"""A call that takes longer counts as hung."""


def until(
    condition: Callable[[], Any], what: str = "the condition is true", progress: Callable[[], Any] = lambda: None
) -> Any:
    """Poll a condition and return its first true value.

    Args:
        progress: a wait of many steps takes long on a busy machine; the time counts from the last change of this value.
    """
    deadline, before = time.monotonic() + TIMEOUT_S, progress()
    while time.monotonic() < deadline:
        if value := condition():
            return value
        if (now := progress()) != before:
            deadline, before = time.monotonic() + TIMEOUT_S, now
        time.sleep(0.01)
    raise AssertionError(f"timed out waiting until {what}")


@dataclass(eq=False)
class LiveServer:
    """A live server and its policy versions.

    Between tests it has the weights of seed 0, no open round, and nothing paused or released.
    """

    server: Server
    model: Callable[[int], Path]
    """`model(seed)`: the weights of one policy, in the server's shape."""
    policies: dict[int, Path] = field(default_factory=dict)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=16))

    def __post_init__(self) -> None:
        self.policies[self.version] = self.model(0)

    @property
    def version(self) -> int:
        return int(self.server.state()["policy_version"])

    def push(self, seed: int, **options: Any) -> int:
        """Push the weights of a seed and return the new version."""
        version = self.server.push(self.model(seed), **options)
        self.policies[version] = self.model(seed)
        return version

    def load(self, seed: int, *, flush: bool = True, status: int = 200) -> Any:
        """Send one SGLang weight call, without begin and end."""
        self.server.loaded = self.model(seed)
        body = {"model_path": str(self.model(seed)), "flush_cache": flush}
        return self.server.post("/update_weights_from_disk", body, status=status)

    # --- background requests

    def in_background(self, call: Callable[..., Any], *args: Any, **named: Any) -> "Future[Any]":
        return self.threads.submit(call, *args, **named)

    def open(self, **body: Any) -> "Future[Any]":
        """Open a round and return once it decodes; `result_of` waits for its reply."""
        before = self.decodes()
        reply = self.in_background(self.server.rollout, **body)
        until(lambda: reply.done() or self.decodes() > before + 3, "the round decodes")
        assert not reply.done(), f"the round ended too soon: {reply.result()}"
        return reply

    @staticmethod
    def result_of(future: "Future[Any]") -> Any:
        return future.result(TIMEOUT_S)

    def decodes(self) -> int:
        """Return the number of decode forwards so far."""
        return sum(f["decode"] for f in self.server.forwards())

    def wait_decodes(self, steps: int = 3) -> None:
        """Wait for some more decode steps."""
        before = self.decodes()
        until(lambda: self.decodes() >= before + steps, f"{steps} decode steps")

    def running(self) -> int:
        return int(self.server.state()["samples"]["running"])

    # --- checks

    def check(self, groups: list[dict[str, Any]], params: Mapping[str, Mapping[str, Any]]) -> list[ReplayResult]:
        """Assert that every sample has the tokens and logprobs that a replay of its spans gives."""
        oracle = Oracle(self.policies)
        return [result for group in groups for result in oracle.check(group, params[group["id"]])]

    def restore(self) -> None:
        """Reset the server after a test, also a failed one."""
        assert self.server.reset(), "the server cannot be reset"
        self.threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def live_server(server: Server, model: Callable[[int], Path]) -> Iterator[LiveServer]:
    live = LiveServer(server, model)
    try:
        yield live
    finally:
        live.restore()
