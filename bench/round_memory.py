"""Memory of every process of a server over one large round: 256 samples × 16,384 tokens by default.

    python -m bench.round_memory [--samples 256] [--tokens 16384] [--encoding msgpack] [--record]    # twenty minutes
    python -m bench.round_memory --stock --record

A tiny model decodes every token, with logprobs, and the round's reply carries all of them; with `--stock`, a stock
server gets the same prompts as one `/generate` request. Rows have one process each: `idle_mb`, its memory before the
round, and `peak_mb`, the most until the client has the reply (anonymous resident memory, read every second; the client
discards what it reads). The scheduler's contains its KV pool, 128 bytes per token, which is resident from the start.
"""

import argparse
import contextlib
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.random_checkpoint import two_policies
from bench.record import RESULTS, Row, append_rows, provenance
from bench.rollout.servers import Size, patched_server, processes, stock_server
from examples import interrupt
from sglang_april.http.bodies import MSGPACK

GROUP = 8
"""Samples of a group."""
PROMPT = 512
"""Tokens of a prompt."""
MB = 2**20
HTTP, SCHEDULER, DETOKENIZER = "HTTP", "scheduler", "detokenizer"


def memory(url: str) -> dict[str, float]:
    """Anonymous resident memory in MB of each process of the server at `url`."""
    found: dict[str, float] = {}
    for process in processes(url):
        command = " ".join(process.cmdline())
        role = SCHEDULER if SCHEDULER in command else DETOKENIZER if DETOKENIZER in command else HTTP
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            anonymous = next(line for line in rollup.splitlines() if line.startswith("Anonymous:"))
            found[role] = found.get(role, 0.0) + int(anonymous.split()[1]) / 1024
    return found


@contextlib.contextmanager
def peaks(url: str, tokens: int, every_s: float = 1.0) -> Iterator[dict[str, float]]:
    """The largest memory of each process while the context lasts. Prints progress every minute."""
    seen: dict[str, float] = {}
    done = threading.Event()

    def watch() -> None:
        began = time.monotonic()
        for reading in itertools.count():
            for role, mb in memory(url).items():
                seen[role] = max(seen.get(role, 0.0), mb)
            if reading % 60 == 59:
                print(f"{time.monotonic() - began:,.0f} s of a round of {tokens:,} tokens", flush=True)
            if done.wait(every_s):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def measure(url: str, samples: int, tokens: int, encoding: str, *, stock: bool) -> list[Row]:
    """One row per process."""
    groups = samples // GROUP
    prompts = [[5 + i % 400] * PROMPT for i in range(groups)]
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    if stock:
        path, body = "/generate", {"input_ids": [ids for ids in prompts for _ in range(GROUP)], "return_logprob": True}
    else:
        given = [{"id": f"p{i}", "n": GROUP, "input_ids": ids} for i, ids in enumerate(prompts)]
        path, body = "/april/rollout", {"run": "memory", "quota": groups, "prompts": given}
    idle = memory(url)
    began = time.monotonic()
    with peaks(url, samples * tokens) as seen:
        size = read(url, path, {**body, "sampling_params": params}, encoding)
    seconds = time.monotonic() - began
    return [
        {
            "bench": "round_memory",
            "server": "stock" if stock else "april",
            "encoding": encoding,
            "samples": samples,
            "tokens": samples * tokens,
            "process": role,
            "idle_mb": round(idle[role]),
            "peak_mb": round(most),
            "body_mb": round(size / MB, 3),
            "seconds": round(seconds, 1),
        }
        for role, most in sorted(seen.items())
    ]


def read(url: str, path: str, body: dict[str, Any], encoding: str) -> int:
    """Post a request and read its answer; returns the size in bytes."""
    headers = {"accept": MSGPACK} if encoding == "msgpack" else {}
    with httpx.stream("POST", url + path, json=body, headers=headers, timeout=None) as answer:
        if answer.is_error:
            raise RuntimeError(f"{path} answered {answer.status_code}: {answer.read().decode(errors='replace')}")
        return sum(len(chunk) for chunk in answer.iter_raw())


def main(given: list[str] | None = None) -> int:
    """Measure, print and perhaps record the rows; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.round_memory", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--samples", type=int, default=256, help=f"samples, a multiple of {GROUP} (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="output tokens of each sample (%(default)s)")
    parser.add_argument(
        "--encoding", choices=("json", "msgpack"), default="msgpack", help="encoding of the reply (%(default)s)"
    )
    parser.add_argument("--stock", action="store_true", help="a stock server and one /generate request, in JSON")
    parser.add_argument("--record", action="store_true", help="append the rows to bench/results/large_reply.json")
    args = parser.parse_args(given)
    if args.samples < GROUP or args.samples % GROUP or args.tokens < 1:
        parser.error(f"--samples must be a multiple of {GROUP}, and --tokens at least 1")
    encoding = "json" if args.stock else args.encoding
    with tempfile.TemporaryDirectory(prefix="april-bench-") as name:
        folder = Path(name)
        pool = args.samples * (args.tokens + PROMPT) + 1024
        size = Size(two_policies(folder, "paced")[0], args.samples, args.tokens + PROMPT + 16, pool)
        common = provenance()
        with (stock_server if args.stock else patched_server)(size, Path("out") / "bench") as url:
            rows = measure(url, args.samples, args.tokens, encoding, stock=args.stock)
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.record:
        append_rows(RESULTS / "large_reply.json", [{**common, **row} for row in rows])
    return 0


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
