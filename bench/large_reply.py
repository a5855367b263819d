"""Memory and time of the HTTP process and of a client for one large round: 256 samples × 16,384 tokens by default.

    python -m bench.large_reply [--samples 256] [--tokens 16384] [--encoding json msgpack stream] [--record]

The HTTP process is real (routes, service, decoding of text, encoding, uvicorn); the scheduler's messages are made up
beforehand with the size and types of real ones, eight samples in each. Every encoding runs in new processes.
`received_mb` is the HTTP process's memory once all samples have arrived and their texts are decoded; `peak_mb` its
maximum until the client has everything; `empty_mb` its memory before the round. `body_mb` is the size of the body.
From the end of the round: `reply_s` until the client has the last byte, `server_cpu_s` the HTTP process's CPU time,
`stall_ms` the longest time its event loop did not run. With `stream` the groups leave as they finish, and only the
summary follows the end. The client discards what it reads.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import numpy as np
import psutil
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from tokenizers import Tokenizer

from bench.record import RESULTS, ROOT, Row, append_rows, provenance
from examples import interrupt
from sglang_april.api import messages
from sglang_april.config import AprilConfig
from sglang_april.http.bodies import MSGPACK
from sglang_april.http.frontend import Frontend, ServerInfo
from sglang_april.http.routes import add_routes
from sglang_april.http.service import AprilService

ENCODINGS = ("json", "msgpack", "stream")
GROUP = 8
"""Samples of a group, which finish in one step."""
SPANS = 4
MB = 2**20


class NoWeights:
    """The reader side of a lock that no weight call acquires."""

    async def acquire_reader(self) -> None: ...
    async def release_reader(self) -> None: ...


class MadeUpScheduler:
    """The interface that the service needs of a front end (`sglang_april.http.frontend`) for rounds of token ids."""

    lock = NoWeights()

    def __init__(self, samples: int, tokens: int) -> None:
        self.tokens, self.groups = tokens, samples // GROUP
        self.tokenizer = Tokenizer.from_file(str(ROOT / "examples" / "checkpoints" / "v0" / "tokenizer.json"))
        self.vocab = self.tokenizer.get_vocab_size()
        self.april = AprilService(cast(Frontend, self), AprilConfig(quota=1))
        self.opened: messages.OpenRound | None = None

    def server_info(self) -> ServerInfo:
        context = 2 * self.tokens
        return ServerInfo(self.vocab, context, context, has_tokenizer=True, priority=False, overlap=True)

    def listen(self) -> None: ...

    async def send(self, payload: bytes) -> None:
        command = messages.decode_message(payload)
        if isinstance(command, messages.OpenRound):
            self.opened = command
        assert not isinstance(command, messages.Observation)
        self._emit(messages.Answer(command.seq, data={"policy_version": SPANS}))

    def finish(self) -> None:
        """Every group of the round finishes."""
        rng = np.random.default_rng(0)
        for prompt in self._round.prompts:
            self._emit(messages.Finished([self._sample(prompt.id, i, rng) for i in range(GROUP)]))

    def end(self) -> None:
        """The round ends by its quota."""
        spec = self._round.spec
        deliver = [messages.Delivery(p.id, 0, list(range(GROUP)), True) for p in self._round.prompts]
        stats = {"t_quota_met": time.time()}
        self._emit(messages.RoundEnded(spec.round_id, spec.run, SPANS, "quota", deliver, {}, stats))

    @property
    def _round(self) -> messages.OpenRound:
        assert self.opened is not None
        return self.opened

    def _sample(self, name: str, index: int, rng: np.random.Generator) -> messages.FinishedSample:
        edges = np.linspace(0, self.tokens, SPANS + 1, dtype=int).tolist()
        return messages.FinishedSample(
            run=self._round.spec.run,
            id=name,
            incarnation=0,
            index=index,
            output_ids=rng.integers(4, self.vocab, self.tokens, dtype="<i4").tobytes(),
            logprobs=(-rng.exponential(1.0, self.tokens)).astype("<f4").tobytes(),
            spans=[messages.Span(a, b, v, "kept") for v, (a, b) in enumerate(itertools.pairwise(edges))],
            finish_reason={"type": "length", "length": self.tokens},
            seed=7,
            whole=index == GROUP - 1,
            round_id=self._round.spec.round_id,
        )

    def _emit(self, event: messages.Event) -> None:
        self.april.receive(messages.encode(event))

    def encode_params(self, params: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode(params)

    def decode(self, ids: list[int], skip_special_tokens: bool, _spaces: bool) -> str | None:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


# --- the HTTP process


def serve(port: int, samples: int, tokens: int) -> None:
    """Run the routes until the process is ended. `/bench/…` lets the client drive the scheduler and read the memory."""
    scheduler = MadeUpScheduler(samples, tokens)
    app = FastAPI()
    app.state.april = scheduler.april
    loop_time = LoopTime()

    @app.post("/bench/{step}")
    async def step(step: str, request: Request) -> JSONResponse:
        await request.body()
        if step == "finish":
            scheduler.finish()
            groups = scheduler.april.completed_groups
            await asyncio.gather(*(d.text for g in groups.whole("bench", ids(scheduler.groups)) for d in g.done))
        elif step == "end":
            loop_time.start()
            scheduler.end()
        return JSONResponse(loop_time.memory())

    add_routes(app, admin=lambda endpoint: endpoint)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


class LoopTime:
    """Memory and CPU time of this process, and the longest pause of its event loop."""

    def __init__(self) -> None:
        self.stall = 0.0
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watch = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.stall, last = max(self.stall, now - last), now

    def memory(self) -> Row:
        return {
            "rss_mb": psutil.Process().memory_info().rss / MB,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "cpu_s": time.process_time(),
            "stall_ms": 1e3 * self.stall,
        }


@contextmanager
def http_process(samples: int, tokens: int) -> Iterator[httpx.Client]:
    """Start an HTTP process; yields a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, samples, tokens), daemon=True)
    process.start()
    try:
        transport = httpx.HTTPTransport(retries=10)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, transport=transport) as client:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                try:
                    client.post("/bench/memory")
                    break
                except httpx.ConnectError:
                    time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.join()


# --- the client


def ids(groups: int) -> list[str]:
    return [f"p{i}" for i in range(groups)]


def measure(encoding: str, samples: int, tokens: int) -> Row:
    """One round in one encoding: the client asks, all groups finish, the round ends, the client has the last byte."""
    groups = samples // GROUP
    prompts = [{"id": name, "n": GROUP, "input_ids": [5] * 512} for name in ids(groups)]
    body = {
        "run": "bench",
        "round_id": "bench",
        "quota": groups,
        "prompts": prompts,
        "stream": encoding == "stream",
        "previews": encoding == "stream",
    }
    body["sampling_params"] = {"max_new_tokens": tokens}
    with http_process(samples, tokens) as client, ThreadPoolExecutor() as threads:
        empty = client.post("/bench/memory").json()
        reply = threads.submit(read, client, body, encoding)
        while client.get("/april/rounds/bench").json().get("state") != "open":
            time.sleep(0.05)
        received = client.post("/bench/finish").raise_for_status().json()
        end = time.perf_counter()
        before = client.post("/bench/end").json()["cpu_s"]
        last, size = reply.result()
        after = client.post("/bench/memory").json()
    return {
        "encoding": encoding,
        "samples": samples,
        "tokens": samples * tokens,
        "empty_mb": round(empty["rss_mb"]),
        "received_mb": round(received["rss_mb"]),
        "peak_mb": round(after["peak_mb"]),
        "body_mb": round(size / MB, 1),
        "reply_s": round(last - end, 3),
        "server_cpu_s": round(after["cpu_s"] - before, 3),
        "stall_ms": round(after["stall_ms"], 1),
    }


def read(client: httpx.Client, body: dict[str, Any], encoding: str) -> tuple[float, int]:
    """Run the round and read its reply: when the last byte arrived, and the size in bytes."""
    headers = {"accept": MSGPACK} if encoding == "msgpack" else {}
    with client.stream("POST", "/april/rollout", json=body, headers=headers) as answer:
        answer.raise_for_status()
        size = sum(len(chunk) for chunk in answer.iter_raw())
    return time.perf_counter(), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=256, help=f"samples of the round, a multiple of {GROUP}")
    parser.add_argument("--tokens", type=int, default=16384, help="output tokens of each sample")
    parser.add_argument(
        "--encoding", nargs="+", choices=ENCODINGS, default=ENCODINGS, help="encodings of the reply to measure"
    )
    parser.add_argument("--record", action="store_true", help="append the rows to bench/results/large_reply.json")
    args = parser.parse_args()
    if args.samples < GROUP or args.samples % GROUP or args.tokens < 1:
        parser.error(f"--samples must be a multiple of {GROUP}, and --tokens at least 1")
    rows = []
    for encoding in args.encoding:
        rows.append(provenance() | measure(encoding, args.samples, args.tokens))
        print(json.dumps({name: value for name, value in rows[-1].items() if name not in provenance()}), flush=True)
    if args.record:
        append_rows(Path(RESULTS) / "large_reply.json", rows)


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
