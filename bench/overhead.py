"""The plugin's cost for stock requests: `sglang.bench_serving` on a stock and on a patched server.

    python -m bench.overhead --repetitions 8

Two pairs, whose order alternates between repetitions: stock against the patched server with the plugin idle (active, no
round open); and both with an additional decoding request, a stock request on the stock server and a sample of a round
on the patched one, so that the round's bookkeeping runs in every step. Rows have output tokens/s
and, for the patched server, the ratio to the stock server of the same pair.
"""

import argparse
import contextlib
import json
import multiprocessing
import runpy
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console

from bench import record
from bench.rollout.presets import PRESETS
from bench.rollout.servers import Size, both_servers
from examples import interrupt
from examples.tiny_model import make
from sglang_april.client import AprilClient

CLIENT = "sglang.bench_serving"
PAIRS = (("stock", "idle"), ("stock, a request beside", "round open"))
PROMPTS, INPUT, OUTPUT = 512, 32, 128
"""Requests of a measurement, and the most tokens of a prompt and of a response. Lengths are uniform from 1 on: requests
of one length end and begin in the same steps, until a delay sets them apart, and rates depend on such accidents."""
CONTEXT = 8192
OPEN_LIMIT_S = 60.0
RUN_LIMIT_S = 600.0
BESIDE = [9, 10, 11]
ENDLESS = CONTEXT - 16
"""Length of a response that outlasts any measurement."""


def serve(
    url: str, model: Path, prompts: int, at_once: int, seed: int, headers: Mapping[str, str] | None = None
) -> float:
    """Output tokens/s of one run of SGLang's client with random ids and lengths, which `seed` gives.

    It runs in a fork of a process that has imported it, which takes longer than the measurement.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        # fmt: off
        options = [
            "--backend", "sglang", "--base-url", url, "--dataset-name", "random-ids", "--num-prompts", str(prompts),
            "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--random-range-ratio", "0.0",
            "--max-concurrency", str(at_once), "--seed", str(seed), "--model", str(model), "--tokenizer", str(model),
            "--tokenize-prompt", "--disable-stream", "--disable-tqdm", "--output-file", str(out),
        ]
        # fmt: on
        if headers:
            options += ["--header", *(f"{name}={value}" for name, value in headers.items())]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([CLIENT])
        client = context.Process(target=_client, args=(options, Path(folder) / "client.log"))
        client.start()
        client.join(RUN_LIMIT_S)
        if client.exitcode != 0:
            client.kill()
            raise RuntimeError(f"{CLIENT} failed:\n{(Path(folder) / 'client.log').read_text()[-2000:]}")
        return float(json.loads(out.read_text().splitlines()[-1])["output_throughput"])


def _client(options: list[str], log: Path) -> None:
    with log.open("w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        sys.argv = [CLIENT, *options]
        runpy.run_module(CLIENT, run_name="__main__")


@contextlib.contextmanager
def plain_request(url: str, tokens: int = ENDLESS) -> Iterator[None]:
    """A stock request with logprobs that decodes throughout and is aborted at the end."""
    rid = f"overhead-{uuid.uuid4().hex[:8]}"
    body = {"rid": rid, "input_ids": BESIDE, "sampling_params": _sampling(tokens), "return_logprob": True}
    waiter = threading.Thread(target=lambda: httpx.post(f"{url}/generate", json=body, timeout=None), daemon=True)
    waiter.start()
    _wait(lambda: _running(url) > 0, "the request did not start")
    try:
        yield
        still = waiter.is_alive()
    finally:
        httpx.post(f"{url}/abort_request", json={"rid": rid}, timeout=OPEN_LIMIT_S)
        waiter.join(OPEN_LIMIT_S)
    _check(still)


@contextlib.contextmanager
def open_round(url: str, tokens: int = ENDLESS) -> Iterator[None]:
    """A round with one sample that decodes throughout; it is stopped and dropped at the end."""
    run = f"overhead-{uuid.uuid4().hex[:8]}"
    prompts = [{"id": "beside", "input_ids": BESIDE, "sampling_params": _sampling(tokens)}]
    with AprilClient(url) as client:
        events = client.stream(run=run, round_id=run, prompts=prompts, quota=None, concurrency=1)
        waiter = threading.Thread(target=lambda: list(events), daemon=True)
        waiter.start()
        _wait(lambda: _is_open(client, run) and _running(url) > 0, "the round did not open")
        try:
            yield
            still = _is_open(client, run)
        finally:
            with contextlib.suppress(Exception):
                client.stop(run)
            client.drop(run)
        _check(still)


def _sampling(tokens: int) -> dict[str, int | float | bool]:
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}


def _is_open(client: AprilClient, round_id: str) -> bool:
    return any(one["round_id"] == round_id for one in client.state()["rounds"])


def _running(url: str) -> int:
    loads = httpx.get(f"{url}/v1/loads", timeout=OPEN_LIMIT_S).json()["loads"]
    return sum(int(load["num_running_reqs"]) for load in loads)


def _wait(until: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + OPEN_LIMIT_S
    while not until():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.01)


def _check(still: bool) -> None:
    if not still:
        raise RuntimeError("the background requests ended before the measured ones: measure fewer prompts")


class OverheadRun:
    """Runs the cases, repetition by repetition."""

    def __init__(self, urls: dict[str, str], model: Path, prompts: int, at_once: int) -> None:
        self._urls, self._model, self._prompts, self._at_once = urls, model, prompts, at_once
        self._seed = 0
        self.ratios: dict[str, list[float]] = {patched: [] for _, patched in PAIRS}

    def case(self, case: str) -> float:
        """Output tokens/s of one run of a case."""
        patched = case in self.ratios
        url = self._urls["april" if patched else "stock"]
        beside = case in PAIRS[1]
        self._seed += 1
        with (open_round(url) if patched else plain_request(url)) if beside else contextlib.nullcontext():
            return serve(url, self._model, self._prompts, self._at_once, self._seed)

    def repetition(self, number: int) -> list[record.Row]:
        """One row per case; every second repetition begins with the patched server."""
        rows: list[record.Row] = []
        for pair in PAIRS:
            rates = {case: self.case(case) for case in (pair if number % 2 == 0 else pair[::-1])}
            ratio = rates[pair[1]] / rates[pair[0]]
            self.ratios[pair[1]].append(ratio)
            for case, of_stock in zip(pair, (1.0, ratio), strict=True):
                row = {"case": case, "repetition": number, "output_tokens_per_s": rates[case], "ratio": of_stock}
                rows.append(row)
        return rows


def main(given: list[str] | None = None) -> int:
    """Append four rows per repetition; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--repetitions", type=int, default=8, help="repetitions of four measurements each (%(default)s)"
    )
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="requests per measurement (%(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=record.RESULTS / "overhead.json",
        help="file to which rows are appended (%(default)s)",
    )
    args, console = parser.parse_args(given), Console(highlight=False)
    plan = PRESETS["cpu"].plan
    common = {"bench": "overhead", "run_id": uuid.uuid4().hex[:12], **record.provenance()}
    with tempfile.TemporaryDirectory(prefix="april-bench-") as folder:
        model = make(Path(folder) / "v0")
        size = Size(model, plan.slots, CONTEXT, 140_000)
        with both_servers(size, record.ROOT / "out" / "bench") as (stock, april):
            # One slot is left for the additional decoding request.
            measured = OverheadRun({"stock": stock, "april": april}, model, args.prompts, plan.slots - 1)
            for url in (stock, april):
                serve(url, model, plan.slots, plan.slots - 1, 0)
            for number in range(args.repetitions):
                rows = measured.repetition(number)
                record.append_rows(args.out, [{**common, **row} for row in rows])
                for row in rows:
                    console.print(f"{row['case']:<24} {row['output_tokens_per_s']:9.0f} tokens/s  {row['ratio']:.3f}")
    console.print("  ".join(f"{case}: {median(values):.3f}" for case, values in measured.ratios.items()))
    return 0


if __name__ == "__main__":
    interrupt.run(main, "rows that were measured are in bench/results/overhead.json; the same command measures again")
