"""Trainers that retry their requests, and a server that is killed at random moments.

Two trainers roll out in separate runs; one of them also pushes. When the server dies during a request, the trainer
sends the same request (same `round_id`) again until it is answered. At the end every requested sample has been
delivered exactly once, with the tokens and logprobs that a replay of its spans gives.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.live import until
from tests.support.oracle import Oracle
from tests.support.server import Server
from tests.support.workload import prompt

TIMEOUT_S = 600.0
TIERS = ("auto", "host", "disk", "none")
REPLY_TIMINGS = ("quota_to_built_s", "quota_to_reply_s")
"""Metrics that the HTTP process adds while it answers; they do not survive a restart."""

Model = Callable[[int], Path]
"""`model(seed)`: the weights of one policy."""


def content(reply: dict[str, Any]) -> str:
    """Serialize a reply without the timings of its delivery, for exact comparison."""
    stats = {name: value for name, value in reply["stats"].items() if name not in REPLY_TIMINGS}
    return json.dumps({**reply, "stats": stats})


@dataclass(eq=False)
class KillScenario:
    """Two trainers on one server that is killed and restarted while they run."""

    server: Server
    model: Model
    seed: int
    name: str = ""
    """Prefix of the run names."""
    rounds: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Answered rounds by run: id and content."""
    requested: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sampling parameters and `n` of every prompt, by id."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    disturb: Callable[[random.Random], None] = lambda _: None
    """Called before each kill, while the trainers run."""
    sigterm_share: float = 0.0
    """The share of servers that end by SIGTERM instead."""
    kills: int = 0
    terminations: int = 0
    """How many of the kills were SIGTERM."""
    replayed: int = 0
    warnings: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.up = threading.Event()
        self.up.set()
        self.stopping = threading.Event()
        self.finished = threading.Event()
        """Set when the server will not be restarted again."""

    # --- trainers

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Send a request until it is answered, also across restarts of the server."""
        while True:
            assert self.up.wait(TIMEOUT_S), "the server did not restart"
            try:
                return httpx.request(method, self.server.url + path, json=body, timeout=TIMEOUT_S)
            except httpx.TransportError:
                if self.finished.is_set():
                    raise

    def roll_out(self, run: str, number: int, **body: Any) -> None:
        """Run one round and record its reply."""
        round_id = f"{run}-{number}"
        body = {"run": run, "round_id": round_id, **body}
        while (response := self.call("POST", "/april/rollout", body)).status_code == 503:
            time.sleep(0.05)  # a push is open
        assert response.status_code == 200, f"{round_id}: {response.status_code} {response.text[:500]}"
        reply = response.json()
        assert reply["round_id"] == round_id
        self.groups += reply["finished"]
        self.rounds.setdefault(run, []).append((round_id, content(reply)))

    def train(self, run: str, *, pushes: bool) -> None:
        rng, number = random.Random(f"{self.seed}{run}"), 0
        while not self.stopping.is_set():
            prompts = []
            for i in range(4):
                name = f"{run}.{number}.{i}"
                prompts.append(prompt(name, rng.choice((8, 20, 60, 200)), n=2, temperature=1.0, sampling_seed=number))
                self.requested[name] = prompts[-1]
            self.roll_out(run, number, prompts=prompts, quota=2, tier=rng.choice(TIERS))
            number += 1
            if pushes and number % 2 == 0:
                self.push(number // 2)
        self.roll_out(run, number, prompts=[], quota=None)

    def push(self, version: int) -> None:
        """Push until the version is reached; a kill during the push leaves either the old or the new version."""
        while self.version() < version:
            with contextlib.suppress(httpx.TransportError):
                self.load(version)

    def version(self) -> int:
        return int(self.call("GET", "/april/state").json()["policy_version"])

    def load(self, version: int) -> None:
        body = {"model_path": str(self.model(version % 2)), "flush_cache": False}
        for path, sent in (
            ("/april/push/begin", {"version": version}),
            ("/update_weights_from_disk", body),
            ("/april/push/end", {"version": version}),
        ):
            response = httpx.post(self.server.url + path, json=sent, timeout=TIMEOUT_S)
            if response.status_code == 503 and not self.up.is_set():
                raise httpx.ReadError("the server shuts down")
            assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:500]}"

    # --- kills

    def kill(self) -> None:
        """Kill the server after a random number of forwards, restart it, and compare its kept replies."""
        self.disturb(self.rng)
        start, wait = self.steps(), self.rng.randint(1, 120)
        until(lambda: self.steps() >= start + wait or self.trainer_failed(), f"{wait} forwards")
        if self.trainer_failed():
            return
        self.restart()
        state = self.server.state()
        self.warnings += len(state["http"]["journal"]["warnings"])
        for answered in list(self.rounds.values()):
            round_id, expected = answered[-1]
            again = httpx.get(f"{self.server.url}/april/rounds/{round_id}", timeout=TIMEOUT_S)
            assert again.status_code == 200, f"{round_id}: {again.text[:500]}"
            assert content(again.json()) == expected, f"the reply of {round_id} has changed"
            self.replayed += 1
        if "version" in state["closed"]:
            self.load(state["policy_version"])
        self.up.set()

    def restart(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill the server and start it again. Trainers wait for `up`."""
        self.up.clear()
        if self.rng.random() < self.sigterm_share:
            assert self.server.terminate(), "SIGTERM did not end the server"
            self.terminations += 1
        else:
            self.server.stop()
        self.kills += 1
        meanwhile()
        self.server.spawn()
        self.server.wait()

    def steps(self) -> int:
        return len(self.server.forwards())

    def trainer_failed(self) -> bool:
        return any(trainer.done() for trainer in self.trainers)

    @contextlib.contextmanager
    def in_background(self, call: Callable[[], httpx.Response]) -> "Iterator[Future[httpx.Response]]":
        """Send a request in a thread that ends with the test."""
        with ThreadPoolExecutor(max_workers=1) as threads:
            try:
                yield threads.submit(call)
            except BaseException:
                self.finished.set()
                raise
            finally:
                self.up.set()

    def run(self, kills: int) -> None:
        """Run the scenario; exceptions of the trainer threads are raised here."""
        with ThreadPoolExecutor(max_workers=2) as threads:
            self.trainers = [
                threads.submit(self.train, f"{self.name}a", pushes=True),
                threads.submit(self.train, f"{self.name}b", pushes=False),
            ]
            try:
                for _ in range(kills):
                    self.kill()
            except BaseException:
                self.finished.set()
                raise
            finally:
                self.stopping.set()
                self.up.set()
            for trainer in self.trainers:
                trainer.result(TIMEOUT_S)
        self.check()

    def check(self) -> None:
        """Assert that every sample was delivered exactly once with the right tokens."""
        delivered = [(g["id"], g["incarnation"], s["index"]) for g in self.groups for s in g["samples"]]
        assert sorted(delivered) == sorted((name, 0, i) for name, p in self.requested.items() for i in range(p["n"]))
        oracle = Oracle({v: self.model(v % 2) for v in range(self.version() + 1)})
        for group in self.groups:
            oracle.check(group, self.requested[group["id"]]["sampling_params"])
