"""A live server together with what its policy versions stand for, and rounds that run beside the test."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.oracle import Oracle, Verdict
from tests.support.server import Server

LIMIT_S = 120.0
"""Whatever takes longer hangs."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of a condition, polled."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


@dataclass(eq=False)
class LiveServer:
    """Between tests the server has the weights of seed 0, no round is open and nothing is paused or released."""

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
        """A whole push; the new version."""
        version = self.server.push(self.model(seed), **options)
        self.policies[version] = self.model(seed)
        return version

    def load(self, seed: int, *, flush: bool = True, status: int = 200) -> Any:
        """One weight call of SGLang's own, without begin and end."""
        self.server.loaded = self.model(seed)
        body = {"model_path": str(self.model(seed)), "flush_cache": flush}
        return self.server.post("/update_weights_from_disk", body, status=status)

    # --- things that happen beside the test

    def beside(self, call: Callable[..., Any], *args: Any, **named: Any) -> "Future[Any]":
        return self.threads.submit(call, *args, **named)

    def open(self, **body: Any) -> "Future[Any]":
        """Open a round and return when it decodes; its reply comes later (`done`)."""
        before = self.decodes()
        reply = self.beside(self.server.rollout, **body)
        until(lambda: reply.done() or self.decodes() > before + 3, "the round decodes")
        assert not reply.done(), f"the round is over too soon: {reply.result()}"
        return reply

    @staticmethod
    def done(future: "Future[Any]") -> Any:
        return future.result(LIMIT_S)

    def decodes(self) -> int:
        """Decode forwards of the model so far."""
        return sum(f["decode"] for f in self.server.forwards())

    def wait_decodes(self, steps: int = 3) -> None:
        """Let some more decode steps happen."""
        before = self.decodes()
        until(lambda: self.decodes() >= before + steps, f"{steps} decode steps")

    def running(self) -> int:
        return int(self.server.state()["samples"]["running"])

    # --- judging

    def check(self, groups: list[dict[str, Any]], params: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
        """Every sample has the tokens and logprobs that its own history under these policies gives."""
        oracle = Oracle(self.policies)
        return [verdict for group in groups for verdict in oracle.check(group, params[group["id"]])]

    def restore(self) -> None:
        """Undo whatever a test, or its failure, left behind."""
        assert self.server.reset(), "the server cannot be brought back to rest"
        self.threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def living(server: Server, model: Callable[[int], Path]) -> Iterator[LiveServer]:
    live = LiveServer(server, model)
    try:
        yield live
    finally:
        live.restore()
