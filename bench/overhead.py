"""What the plugin costs SGLang's own requests: `sglang.bench_serving` on a stock and on a patched server.

    python -m bench.overhead --preset cpu
    python -m bench.overhead --preset paced

The requests of `unattached` belong to no run and those of `attached` do. During `round open`, one more request decodes:
a sample of an open round on the patched server, so that the round's bookkeeping runs in every step, and a stock request
on the stock server. `control` is a second stock server. A row has output tokens/s, the server's CPU time per request,
and the ratio of the rates to the stock server of the same pair.

On a CPU, the servers are started anew for every few pairs, because two processes of one program may differ by several
percent for as long as they live.
"""

import argparse
import contextlib
import itertools
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console

from bench import record
from bench.agent_turns import HEADERS
from bench.pace_tables import TABLES
from bench.random_checkpoint import two_policies
from bench.rollout.servers import Size, both_servers, stock_server
from bench.server_pairs import Pair, Side, measure, serve
from examples import interrupt
from examples.april_demo.server import has_gpu
from sglang_april.client import AprilClient

OPEN_LIMIT_S = 60.0
BESIDE = [9, 10, 11]


@dataclass(frozen=True)
class OverheadPreset:
    """Sizes of the servers, and the load."""

    slots: int
    context: int
    at_once: int
    """Requests at once. One slot is left for the additional request of `round open`."""
    prompts: int
    """Requests of a measurement."""
    launches: int
    """Launches of the servers."""
    repetitions: int
    """Pairs of each kind in a launch."""
    together: bool
    """Whether both servers are measured at the same time. Two cores do not keep the pace of two GPUs."""
    shape: str = "tiny"
    pace: Path | None = None


PRESETS = {
    "smoke": OverheadPreset(8, 2048, 7, 16, 1, 1, together=True),
    "cpu": OverheadPreset(32, 4096, 31, 256, 8, 2, together=True),
    # Two cores keep the pace of steps of 16 ms, beside the client, but not that of Qwen3-4B, whose steps take 4 ms.
    "paced": OverheadPreset(
        64, 8192, 16, 256, 1, 6, together=False, shape="paced", pace=TABLES / "qwen3-30b-a3b-h100.json"
    ),
}


def pairs(stock: str, april: str, second_stock: str | None, endless: int) -> list[Pair]:
    """The pairs of one repetition, by the servers' URLs; the control needs a second stock server.

    Args:
        endless: tokens of a response that outlasts a measurement.
    """
    control = [Pair("control", Side(stock), Side(second_stock))] if second_stock else []
    plain, sample = partial(plain_request, tokens=endless), partial(open_round, tokens=endless)
    return [
        *control,
        Pair("unattached", Side(stock), Side(april)),
        Pair("attached", Side(stock), Side(april, HEADERS)),
        Pair("round open", Side(stock, beside=plain), Side(april, beside=sample)),
    ]


def measure_launches(size: Size, preset: OverheadPreset, logs: Path) -> Iterator[list[record.Row]]:
    """The rows of one pair after the other."""
    seeds = itertools.count(1)
    pace = {"pace": preset.pace.stem} if preset.pace is not None else {}
    for launch in range(preset.launches):
        with contextlib.ExitStack() as stack:
            urls = stack.enter_context(both_servers(size, logs))
            second = stack.enter_context(stock_server(size, logs / "control")) if preset.together else None
            for url in filter(None, (*urls, second)):
                serve(url, size.model, size.slots, preset.at_once, 0)
            serve(urls[1], size.model, size.slots, preset.at_once, 0, HEADERS)
            for repetition in range(preset.repetitions):
                for pair in pairs(*urls, second, endless=size.context - 16):
                    rows = measure(
                        pair,
                        size.model,
                        prompts=preset.prompts,
                        at_once=preset.at_once,
                        seed=next(seeds),
                        together=preset.together,
                        reverse=(launch + repetition) % 2 == 1,
                    )
                    yield [{**row, "launch": launch, "repetition": repetition, **pace} for row in rows]


@contextlib.contextmanager
def plain_request(url: str, tokens: int) -> Iterator[None]:
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
def open_round(url: str, tokens: int) -> Iterator[None]:
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


def main(given: list[str] | None = None) -> int:
    """Append two rows per pair as they are measured; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu", help="sizes, load and pace (%(default)s)")
    for name, what in (
        ("prompts", "requests of a measurement"),
        ("launches", "launches of the servers"),
        ("repetitions", "pairs of each kind in a launch"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{what} (the preset's)")
    parser.add_argument(
        "--out",
        type=Path,
        default=record.RESULTS / "overhead.json",
        help="file to which rows are appended (%(default)s)",
    )
    args, console = parser.parse_args(given), Console(highlight=False)
    changed = {name: value for name in ("prompts", "launches", "repetitions") if (value := getattr(args, name))}
    preset = replace(PRESETS[args.preset], **changed)
    preset = replace(preset, together=preset.together and not has_gpu())
    common = {"preset": args.preset, "run_id": uuid.uuid4().hex[:12], **record.provenance()}
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="april-bench-") as folder:
        model = two_policies(Path(folder), preset.shape)[0]
        size = Size(model, preset.slots, preset.context, preset.slots * preset.context // 2, pace=preset.pace)
        for rows in measure_launches(size, preset, record.ROOT / "out" / "bench"):
            record.append_rows(args.out, [{**common, **row} for row in rows])
            for row in rows:
                console.print(f"{row['case']:<24} {row['output_tokens_per_s']:9.0f} tokens/s  {row['ratio']:.3f}")
            ratios.setdefault(rows[1]["case"], []).append(rows[1]["ratio"])
    console.print("  ".join(f"{case}: {median(values):.3f}" for case, values in ratios.items()))
    return 0


if __name__ == "__main__":
    interrupt.run(main, "rows that were measured are kept; the same command measures again")
