"""Hostile clients beside open rounds: SGLang's own routes with any ids, sizes and timings.

A `Neighbour` makes drawn calls one after the other; several run at once. Whatever they do, the server lives, and after
`heal` the rounds beside them deliver every sample once, with exact tokens.
"""

import contextlib
import random
import re
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tests.support.hostile_values import CUSTOM, IDS, LENGTHS, MODES, NAMES, PLAIN_NAMES, RARE, RIDS
from tests.support.live import LiveServer
from tests.support.server import Server

CALLS = {
    "generate": 12,
    "chat": 4,
    "completions": 2,
    "abort": 6,
    "pause": 2,
    "unpause": 3,
    "flush": 3,
    "weights": 2,
    "broken_weights": 1,
    "release": 1,
    "resume": 2,
    "april": 4,
    "trajectories": 2,
    "push": 1,
    "read": 3,
}
"""Kinds of calls, and how often each is drawn."""

Call = tuple[str, int | str]
"""A kind, and the seed of its arguments."""

ATTEMPTS = 5
WEIGHTS = threading.Lock()
"""One weight call at a time: under a pause, SGLang 0.5.17 does not serialise them, and its HTTP process ends. One that
waits for the end of a pause times out, so a slow machine may still show that."""


@dataclass
class Neighbour:
    """One client. It ignores what it is answered."""

    server: Server
    model: Path
    """Weights that its weight calls load: those of the current policy."""
    name: str
    """Of the runs of its own."""
    runs: tuple[str, ...] = ()
    """Runs of others, which its attached requests name too."""
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """Paths of calls that were answered with 500."""

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.server.url, timeout=8)

    def run(self, calls: Iterable[Call]) -> None:
        """Make calls; returns when all are answered, refused, timed out or disconnected."""
        with self.http:
            for kind, seed in calls:
                try:
                    getattr(self, kind)(random.Random(seed))
                except httpx.TimeoutException:
                    self.statuses["timeout"] += 1
                except httpx.TransportError:  # uvicorn breaks off some answers; a server that died fails the round
                    self.statuses["broken"] += 1
                self.statuses[kind] += 1

    def _post(self, path: str, body: Any, timeout: float | None = None, headers: dict[str, str] | None = None) -> None:
        options = {} if timeout is None else {"timeout": timeout}
        answer = self.http.post(path, json=body, headers=headers, **options)  # type: ignore[arg-type]
        self._count(path, answer)

    def _count(self, path: str, answer: httpx.Response) -> None:
        self.statuses[str(answer.status_code)] += 1
        if answer.status_code == 500:
            self.faults[path] += 1

    def _attach(self, rng: random.Random, body: dict[str, Any]) -> dict[str, str]:
        """Let every second request name a run, its own or another's, and some a trajectory (`attached-request`).

        Returns the headers; `/generate` may name them in its parameters instead, with any values.
        """
        if rng.random() < 0.5:
            return {}
        keys = ["x-april-run", *(("x-april-trajectory", "x-april-group") if rng.random() < 0.4 else ())]
        if "sampling_params" in body and rng.random() < 0.4:
            given, names = body["sampling_params"], {key: rng.choice((*NAMES, *self.runs)) for key in keys}
            for params in given if isinstance(given, list) else [given]:
                params["custom_params"] = dict(names) if rng.random() < 0.8 else rng.choice(CUSTOM)
            return {}
        return {key: rng.choice((*PLAIN_NAMES, *self.runs)) for key in keys}

    def _some(self, rng: random.Random, **choices: tuple[Any, ...]) -> dict[str, Any]:
        return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.6}

    def _params(self, rng: random.Random) -> dict[str, Any]:
        return self._some(
            rng,
            max_new_tokens=LENGTHS,
            temperature=(0, 1.0, -1, 1e9, "hot"),
            n=(1, 2, 0, 40, -1),
            sampling_seed=(3, -1, 2**40),
            ignore_eos=(True, False),
            stop=("1", ["1", ""], 7),
            regex=("[0-9]+", "("),
        ) | {name: rng.choice(values) for name, values in RARE.items() if rng.random() < 0.05}

    def _batch(self, rng: random.Random) -> dict[str, Any]:
        """Prompts with parameters of their own, most of which fit together."""
        prompts = rng.choice([{"text": ["1", "2 3"]}, {"input_ids": [[1], [2, 3]]}, {"input_ids": [[7] * 40] * 2}])
        size = rng.choice((2, 2, 2, 1, 3, 0))
        each = [self._params(rng) if rng.random() < 0.3 else {"max_new_tokens": 20} for _ in range(size)]
        if rng.random() < 0.8:  # SGLang wants one `n` for all
            each = [{**params, "n": 1} for params in each]
        return {**prompts, "sampling_params": each}

    def generate(self, rng: random.Random) -> None:
        body: dict[str, Any] = {"sampling_params": self._params(rng)}
        body |= {"text": rng.choice(["1 2 3", "", "x" * 3000, ["1", "2"], 7])} if rng.random() < 0.4 else {}
        body |= {"input_ids": rng.choice(IDS)} if rng.random() < 0.6 else {}
        if rng.random() < 0.2:
            body = self._batch(rng)
        body |= self._some(
            rng,
            rid=RIDS,
            return_logprob=(True, False),
            logprob_start_len=(0, 2, -1, 10**6, -7),
            top_logprobs_num=(0, 3, 10**6),
            priority=(0, 10**9),
            extra_key=("k", "|v0", ""),
            stream=(False, False, True),
        )
        headers = self._attach(rng, body)
        if rng.random() < 0.3:  # a disconnect
            with contextlib.suppress(httpx.TimeoutException):
                self._post("/generate", body, timeout=rng.choice([0.01, 0.1, 0.5]), headers=headers)
            return
        self._post("/generate", body, timeout=2, headers=headers)

    def chat(self, rng: random.Random) -> None:
        body = {"model": "m", "messages": rng.choice([[{"role": "user", "content": "1"}], [], "no", [{"role": 3}]])}
        body |= self._some(rng, max_tokens=LENGTHS, rid=RIDS, stream=(True, False), n=(1, 3, -1), logprobs=(True,))
        self._post("/v1/chat/completions", body, timeout=2, headers=self._attach(rng, body))

    def completions(self, rng: random.Random) -> None:
        body = {"model": "m", "prompt": rng.choice(["1 2", [1, 2, 3], [], ["1", "2"], None])}
        body |= self._some(rng, max_tokens=LENGTHS, rid=RIDS, echo=(True, False), stream=(True, False))
        self._post("/v1/completions", body, timeout=2, headers=self._attach(rng, body))

    def abort(self, rng: random.Random) -> None:
        body = {"rid": rng.choice(RIDS)} if rng.random() < 0.9 else {"abort_all": True}
        self._post("/abort_request", body)

    def pause(self, rng: random.Random) -> None:
        self._post("/pause_generation", {"mode": rng.choice(MODES)})

    def unpause(self, rng: random.Random) -> None:
        self._post("/continue_generation", rng.choice([{}, {"torch_empty_cache": False}]))

    def flush(self, rng: random.Random) -> None:
        self._post("/flush_cache" + rng.choice(["", "?timeout=1", "?timeout=-1", "?timeout=x"]), {})

    def weights(self, rng: random.Random) -> None:
        """The same weights again: the version moves, the policy does not."""
        body = {
            "model_path": str(self.model),
            "flush_cache": rng.choice([True, False]),
            "abort_all_requests": rng.random() < 0.2,
        }
        with WEIGHTS:
            self._post("/update_weights_from_disk", body)

    def broken_weights(self, rng: random.Random) -> None:
        """Weights that do not exist, or are none."""
        bodies: dict[str, dict[str, Any]] = {
            "/update_weights_from_disk": {"model_path": "/nowhere"},
            "/update_weights_from_tensor": {"serialized_named_tensors": rng.choice([["x"], [], ["gAROLg=="]])},
            "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["none"], "shapes": [[1]]},
        }
        path = rng.choice(list(bodies))
        with WEIGHTS:
            self._post(path, {**bodies[path], "flush_cache": rng.choice([True, False])})

    def release(self, rng: random.Random) -> None:
        self._post("/release_memory_occupation", {"tags": rng.choice([["kv_cache"], ["no such tag"], [], None])})

    def resume(self, rng: random.Random) -> None:
        self._post("/resume_memory_occupation", {"tags": rng.choice([["kv_cache"], ["weights"], None])})

    def april(self, rng: random.Random) -> None:
        """Calls of another run, most of them malformed."""
        prompt = {"id": rng.choice(["a", "b", "", 7]), "input_ids": rng.choice(IDS), "n": rng.choice([1, 2, 0, "x"])}
        bodies = {
            "/april/rollout": {
                "run": rng.choice([self.name, "", 7]),
                "prompts": rng.choice([[prompt], [], None, "no"]),
                "quota": rng.choice([1, 0, None, -1]),
                "sampling_params": {"max_new_tokens": rng.choice(LENGTHS)},
            },
            "/april/rounds/none/stop": {},
            "/april/rounds/none/judge": {"accept": ["a"]},
            "/april/rounds/none/ack": {},
            "/april/drop": {"run": self.name},
        }
        path = rng.choice(list(bodies))
        self._post(
            path, rng.choice([bodies[path], [], "text", None]) if rng.random() < 0.3 else bodies[path], timeout=2
        )

    def trajectories(self, rng: random.Random) -> None:
        """Rounds of trajectories of its own, and the ends and records of any trajectory."""
        run, name = rng.choice((self.name, *NAMES, *self.runs)), rng.choice(NAMES)
        body: dict[str, Any]
        match rng.randrange(4):
            case 0:
                body = {"run": self.name, "quota_unit": "trajectory", "quota": rng.choice([1, None, 0])}
                self._post("/april/rollout", body, timeout=1)
            case 1:
                ended: tuple[Any, ...] = ({str(name): {"reward": 1}}, {}, [], None)
                body = {"run": run, "trajectories": rng.choice(ended)} | self._some(rng, reject=([name], [], 7))
                self._post("/april/trajectories/done", body, timeout=2)
            case 2:
                body = {"trajectories": {str(name): {}}}
                self._post(f"/april/rounds/{rng.choice(('none', *self.runs))}/done", body, timeout=2)
            case _:
                path = f"/april/trajectories/{quote(str(name))}"
                self._count(path, self.http.get(path, params={"run": str(run)}, timeout=2))

    def push(self, rng: random.Random) -> None:
        self._post(
            rng.choice(["/april/push/begin", "/april/push/end"]), rng.choice([{}, {"version": -1}, {"version": "x"}])
        )

    def read(self, rng: random.Random) -> None:
        paths = (
            "/april/state",
            "/april/partials",
            "/april/rounds/none",
            "/health",
            "/server_info",
            "/v1/models",
            "/none",
        )
        path = rng.choice(paths)
        self._count(path, self.http.get(path))


def heal(live: LiveServer) -> None:
    """Undo what neighbours may leave: a pause, released memory, an open push, weights that failed to load."""
    server = live.server
    server.http.post("/continue_generation", json={})
    if released := re.search(r"memory is released \((.*?)\)", server.state()["closed"]):
        server.post("/resume_memory_occupation", {"tags": released[1].split(", ")})
    for _ in range(ATTEMPTS):
        if not server.state()["closed"]:
            return
        with contextlib.suppress(AssertionError):  # calls of clients that timed out may still run, and fail the push
            server.push(live.model(0), flush=False)
    assert not server.state()["closed"]
