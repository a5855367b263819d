"""Trainers that do not give up, and a server that is killed under them at random moments.

Two trainers roll out under runs of their own; one of them also pushes. A request that dies with the server is sent
again, the same one under the same `round_id`, until it is answered. At the end everything that was ever asked for has
been delivered exactly once, with the tokens and logprobs that its own history gives.
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

PATIENCE_S = 600.0
TIERS = ("auto", "host", "disk", "none")
OURS_ALONE = ("quota_to_built_s", "quota_to_reply_s")
"""Figures that the HTTP process adds while it answers; nobody knows them after its death."""

Model = Callable[[int], Path]
"""`model(seed)`: the weights of one policy."""


def content(reply: dict[str, Any]) -> str:
    """What a reply says, byte for byte."""
    stats = {name: value for name, value in reply["stats"].items() if name not in OURS_ALONE}
    return json.dumps({**reply, "stats": stats})


@dataclass(eq=False)
class Story:
    server: Server
    model: Model
    seed: int
    name: str = ""
    """Its runs' names begin with it."""
    rounds: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Answered rounds of each run: id and content."""
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sampling parameters and `n` of every prompt, by id."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    kills: int = 0
    replayed: int = 0
    warnings: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.up = threading.Event()
        self.up.set()
        self.ending = threading.Event()
        self.over = threading.Event()
        """The server does not come back any more."""

    # --- what a trainer does

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """A request until it is answered, however often the server dies meanwhile."""
        while True:
            assert self.up.wait(PATIENCE_S), "the server does not come back"
            try:
                return httpx.request(method, self.server.url + path, json=body, timeout=PATIENCE_S)
            except httpx.TransportError:
                if self.over.is_set():
                    raise

    def ask(self, run: str, number: int, **body: Any) -> None:
        """A round, and its reply for good."""
        round_id = f"{run}-{number}"
        asked = {"run": run, "round_id": round_id, **body}
        while (response := self.call("POST", "/april/rollout", asked)).status_code == 503:
            time.sleep(0.05)  # a push is open
        assert response.status_code == 200, f"{round_id}: {response.status_code} {response.text[:500]}"
        reply = response.json()
        assert reply["round_id"] == round_id
        self.groups += reply["finished"]
        self.rounds.setdefault(run, []).append((round_id, content(reply)))

    def train(self, run: str, *, pushes: bool) -> None:
        rng, number = random.Random(f"{self.seed}{run}"), 0
        while not self.ending.is_set():
            prompts = []
            for i in range(4):
                name = f"{run}.{number}.{i}"
                prompts.append(prompt(name, rng.choice((8, 20, 60, 200)), n=2, temperature=1.0, sampling_seed=number))
                self.asked[name] = prompts[-1]
            self.ask(run, number, prompts=prompts, quota=2, tier=rng.choice(TIERS))
            number += 1
            if pushes and number % 2 == 0:
                self.push(number // 2)
        self.ask(run, number, prompts=[], quota=None)

    def push(self, version: int) -> None:
        """A push that may be cut off by the server's death: afterwards the version is the old one or the new."""
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
            response = httpx.post(self.server.url + path, json=sent, timeout=PATIENCE_S)
            assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:500]}"

    # --- who kills the server

    def kill(self) -> None:
        """At a random forward of the model, or between two."""
        start, wait = self.steps(), self.rng.randint(1, 120)
        until(lambda: self.steps() >= start + wait or self.trouble(), f"{wait} forwards")
        if self.trouble():
            return
        self.restart()
        state = self.server.state()
        self.warnings += len(state["http"]["journal"]["warnings"])
        for answered in list(self.rounds.values()):
            round_id, said = answered[-1]
            again = httpx.get(f"{self.server.url}/april/rounds/{round_id}", timeout=PATIENCE_S)
            assert again.status_code == 200, f"{round_id}: {again.text[:500]}"
            assert content(again.json()) == said, f"the reply of {round_id} has changed"
            self.replayed += 1
        if "version" in state["closed"]:
            self.load(state["policy_version"])
        self.up.set()

    def restart(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """The end of one server and the start of the next. Trainers wait for `up`."""
        self.up.clear()
        self.server.stop()
        self.kills += 1
        meanwhile()
        self.server.spawn()
        self.server.wait()

    def steps(self) -> int:
        return len(self.server.forwards())

    def trouble(self) -> bool:
        return any(trainer.done() for trainer in self.trainers)

    @contextlib.contextmanager
    def beside(self, call: Callable[[], httpx.Response]) -> "Iterator[Future[httpx.Response]]":
        """A request in a thread of its own, which does not outlive the test."""
        with ThreadPoolExecutor(max_workers=1) as threads:
            try:
                yield threads.submit(call)
            except BaseException:
                self.over.set()
                raise
            finally:
                self.up.set()

    def tell(self, kills: int) -> None:
        """The whole story; what goes wrong in a trainer's thread is raised here."""
        with ThreadPoolExecutor(max_workers=2) as threads:
            self.trainers = [
                threads.submit(self.train, f"{self.name}a", pushes=True),
                threads.submit(self.train, f"{self.name}b", pushes=False),
            ]
            try:
                for _ in range(kills):
                    self.kill()
            except BaseException:
                self.over.set()
                raise
            finally:
                self.ending.set()
                self.up.set()
            for trainer in self.trainers:
                trainer.result(PATIENCE_S)
        self.check()

    def check(self) -> None:
        """Everything exactly once, and all of it right."""
        delivered = [(g["id"], g["incarnation"], s["index"]) for g in self.groups for s in g["samples"]]
        assert sorted(delivered) == sorted((name, 0, i) for name, p in self.asked.items() for i in range(p["n"]))
        oracle = Oracle({v: self.model(v % 2) for v in range(self.version() + 1)})
        for group in self.groups:
            oracle.check(group, self.asked[group["id"]]["sampling_params"])
