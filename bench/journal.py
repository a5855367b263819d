"""The cost of the journal: delivered tokens/s with and without it, alternating between two equal servers.

    python -m bench.journal               five runs each and the ratio of their medians, as a row of the results
    python -m bench.journal --sync full   safe against loss of power too

Both servers run throughout, and the one that is not measured is idle. A run is a number of rounds of one workload:
the same prompts, lengths and seeds for both. The clock runs from the first request to the last reply; warm-up rounds
are not in it.
"""

import argparse
import contextlib
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console

from bench import record
from examples import interrupt
from examples.april_demo.server import running_server
from examples.april_demo.settings import Settings
from sglang_april.client import AprilClient

PROMPT = 16
"""Tokens."""


def prompts(name: str, count: int, samples: int, rng: random.Random) -> list[record.Row]:
    """Groups with log-normal lengths (median 90, σ 0.8) of up to 800 tokens, so that rounds suspend samples."""
    made = []
    for i in range(count):
        length = max(8, min(800, int(rng.lognormvariate(4.5, 0.8))))
        made.append(
            {
                "id": f"{name}.{i}",
                "input_ids": [rng.randrange(10, 200) for _ in range(PROMPT)],
                "n": samples,
                "sampling_params": {"max_new_tokens": length, "ignore_eos": True, "sampling_seed": i},
            }
        )
    return made


def run(url: str, name: str, options: argparse.Namespace) -> float:
    """Delivered tokens/s of one run, which is dropped at the end."""
    rng = random.Random(options.seed)
    delivered, start = 0, 0.0
    with AprilClient(url) as april:
        for number in range(options.warmup + options.rounds):
            if number == options.warmup:
                start = time.perf_counter()
            batch = prompts(
                f"{name}.{number}", 2 * options.quota if not number else options.quota, options.samples, rng
            )
            reply = april.rollout(run=name, prompts=batch, quota=options.quota)
            if number >= options.warmup:
                delivered += reply.stats["delivered"]["tokens"]
        seconds = time.perf_counter() - start
        april.drop(name)
    return delivered / seconds


def measure(options: argparse.Namespace) -> record.Row:
    settings, console = Settings(slots=options.slots, groups=options.quota), Console()
    rates: dict[str, list[float]] = {"without": [], "with": []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        urls = {}
        for name in rates:
            (folder / name).mkdir()
            flags = [f"--april-journal={folder / 'journal'}", f"--april-journal-sync={options.sync}"]
            extra = flags if name == "with" else []
            urls[name] = stack.enter_context(running_server(settings, folder / name, console, extra))
        for number in range(options.runs):
            turns = list(rates) if number % 2 == 0 else list(rates)[::-1]
            for name in turns:
                rates[name].append(run(urls[name], f"{name}-{number}", options))
                console.print(f"run {number + 1}, {name} the journal: {rates[name][-1]:.1f} delivered tokens/s")
        size = (folder / "journal").stat().st_size
    medians = {name: median(values) for name, values in rates.items()}
    return {
        "sync": options.sync,
        "ratio": medians["with"] / medians["without"],
        "median_tokens_per_s": medians,
        "runs_tokens_per_s": rates,
        "journal_bytes": size,
        "config": {k: getattr(options, k) for k in ("runs", "rounds", "warmup", "quota", "samples", "slots", "seed")},
    }


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.journal", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="runs with and without the journal (%(default)s each)")
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds per run (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before the measured ones (%(default)s)")
    parser.add_argument("--quota", type=int, default=8, help="quota of a round in groups (%(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="samples per group (%(default)s)")
    parser.add_argument("--slots", type=int, default=32, help="samples that run at the same time (%(default)s)")
    parser.add_argument(
        "--sync", choices=("normal", "full"), default="normal", help="value of --april-journal-sync (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and lengths (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder of the journal, on the disk to measure")
    parser.add_argument(
        "--out",
        type=Path,
        default=record.RESULTS / "journal.json",
        help="file to which rows are appended (%(default)s)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    row = {**record.provenance(), **measure(options)}
    record.append_rows(options.out, [row])
    print(json.dumps({name: row[name] for name in ("sync", "ratio", "median_tokens_per_s", "journal_bytes")}, indent=1))


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
