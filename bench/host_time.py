"""CPU time of the scheduler loop per decode step, outside of the model, for stock requests and for samples of a round.

    python -m bench.host_time --running 256 512 1024 --record
    python -m bench.host_time --running 256 --n 16 --prompt 32768 --tokens 48 --repetitions 2 --record

A stock server and a patched one run at a GPU's pace (`--april-cpu-pace`) and decode the same batch in turn: as one
`/generate` request with a list of prompts, and as one round. Both trace their scheduler loop (`bench.traced_server`). A
row has the CPU milliseconds of the scheduler's thread per step while the batch is full, by part of the loop:

- `run`: `run_batch` without the model's forward and the sampler; `sample`: drawing tokens;
- `results`: tokens into requests; `next`: choosing the next batch; `requests`: control requests; `loop`: the rest.

`host_ms` is the sum of all parts but `sample`, whose work a GPU does.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import record, traced_server
from bench.pace_tables import TABLES
from bench.random_checkpoint import SHAPES
from bench.random_checkpoint import make as make_shape
from bench.rollout.engine_client import EngineClient
from bench.rollout.limit import LOGPROBS, params, prompts
from bench.rollout.servers import Size, both_servers
from examples import interrupt

PACE = TABLES / "qwen3-4b-h100.json"
PARTS = ("run", "results", "next", "requests", "loop")
"""The parts of `host_ms`."""


def per_step(spans: Sequence[dict[str, Any]], rows: int) -> dict[str, float]:
    """Mean CPU milliseconds per step of each part, between the first and the last decode of a full batch.

    Raises:
        ValueError: fewer than three decodes had `rows` rows.
    """
    full = [i for i, span in enumerate(spans) if span["piece"] == "forward" and span["decode"] and span["rows"] == rows]
    if len(full) < 3:
        raise ValueError(f"{len(full)} steps had {rows} rows: decode more tokens")
    inside = spans[full[0] : full[-1]]
    took = dict.fromkeys(("forward", "sample", *PARTS), 0.0)
    for span in inside:
        took[span["piece"]] += span["cpu"]
        took["run"] -= span["cpu"] if span["piece"] in ("forward", "sample") else 0.0
    took["loop"] = spans[full[-1]]["thread"] - spans[full[0]]["thread"] - sum(took.values())
    steps = len(full) - 1
    parts = {f"{name}_ms": 1000 * seconds / steps for name, seconds in took.items()}
    return {"steps": steps, "host_ms": sum(parts[f"{name}_ms"] for name in PARTS), **parts}


async def decode(engine: EngineClient, running: int, n: int, prompt: int, tokens: int) -> None:
    """One batch of `running` responses of `tokens` tokens each, `n` to a prompt of `prompt` tokens."""
    given = prompts(running // n, prompt)
    if not engine.patched:
        body = {"input_ids": given, "sampling_params": {**params(tokens), "n": n}, **LOGPROBS}
        await engine.post("/generate", body)
        return
    body = {"prompts": [{"id": str(i), "input_ids": ids, "n": n} for i, ids in enumerate(given)], "quota": None}
    await engine.rollout({**body, "run": "host-time", "sampling_params": params(tokens)})


async def measure(
    urls: tuple[str, str], folder: Path, args: argparse.Namespace, write: Callable[[record.Row], None]
) -> None:
    """Write a row per server, batch size and repetition, as it is measured."""
    async with EngineClient(urls[0], patched=False) as stock, EngineClient(urls[1], patched=True) as patched:
        servers = {"stock": stock, "batch quota": patched}
        files = zip(servers, (traced_server.STOCK_SPANS, traced_server.SPANS), strict=True)
        lines = {name: traced_server.Lines(folder / file) for name, file in files}
        for running in args.running:
            for repetition in range(-1, args.repetitions):
                for name, engine in sorted(servers.items(), reverse=bool(repetition % 2)):
                    seen = len(lines[name].read(0.0))
                    await decode(engine, running, args.n, args.prompt, args.tokens if repetition >= 0 else 8)
                    if repetition < 0:
                        continue  # the first batch of a size warms up
                    row: record.Row = {"server": name, "running": running, "n": args.n, "prompt": args.prompt}
                    row |= {"repetition": repetition, "tokens": args.tokens}
                    row |= per_step(lines[name].read(0.0)[seen:], running)
                    print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
                    write(row)


def main(given: list[str] | None = None) -> int:
    """Measure and print or record the rows; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_time", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=[256, 512, 1024], help="batch sizes (%(default)s)")
    parser.add_argument("--n", type=int, default=1, help="responses of a prompt (%(default)s)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each response (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=4, help="batches per size and server (%(default)s)")
    parser.add_argument("--record", action="store_true", help="append the rows to bench/results/host_time.json")
    args = parser.parse_args(given)
    if any(running % args.n for running in args.running):
        parser.error("--running must be multiples of --n")
    with tempfile.TemporaryDirectory(prefix="april-bench-") as name:
        folder = Path(name)
        model = make_shape(folder / "model", SHAPES["paced"])
        most = max(args.running)
        size = Size(
            model,
            most,
            args.prompt + args.tokens + 8,
            most // args.n * args.prompt + most * (args.tokens + 64) + 2 * args.prompt,
            launcher="bench.traced_server",
            stock_launcher="bench.traced_server",
            pace=PACE,
        )
        common = record.provenance()
        shared = {"bench": "host_time", "run_id": f"host-time-{common['time']}", "pace": PACE.stem, **common}

        def write(row: record.Row) -> None:
            if args.record:
                record.append_rows(record.RESULTS / "host_time.json", [{**shared, **row}])

        with traced_server.into(folder, spans=True), both_servers(size, Path("out") / "bench") as urls:
            asyncio.run(measure(urls, folder, args, write))
    return 0


if __name__ == "__main__":
    interrupt.run(main, "rows of finished batches were written if --record was given")
