"""Command line of the demo: ``python -m examples.april_demo --help``."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.april_demo.engine import Engine, EngineError, Watch
from examples.april_demo.measure import Result, figures, run_interleaved
from examples.april_demo.report import draw_timeline, show_table, write_summary
from examples.april_demo.server import ServerError, running_server
from examples.april_demo.settings import ROOT, Settings
from examples.april_demo.variants import VARIANTS


def arguments() -> argparse.Namespace:
    """The options; unknown ones behind ``--`` go to the server."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m examples.april_demo",
        description="Runs rounds with weight updates between them three ways: waiting for all, APRIL from outside the "
        "engine, and sglang-april. Ends with a table, a picture and out/demo/summary.json.",
        epilog="Options after -- are passed to the server, for example: -- --attention-backend triton",
    )
    parser.add_argument("--server", metavar="URL", help="use a running server (started with the demo's model)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="folder for the results")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="measured rounds (%(default)s)")
    parser.add_argument("--warmup-rounds", type=int, default=default.warmup_rounds, help="rounds before (%(default)s)")
    parser.add_argument("--groups", type=int, default=default.groups, help="groups per round (%(default)s)")
    parser.add_argument("--samples-per-group", type=int, default=default.samples_per_group, help="n (%(default)s)")
    parser.add_argument("--slots", type=int, default=default.slots, help="samples at once (%(default)s)")
    parser.add_argument(
        "--over-provision", type=float, default=default.over_provision, help="outside only (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of prompts and sampling (%(default)s)")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(default.variants))
    parser.add_argument("server_options", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def settings_from(args: argparse.Namespace) -> Settings:
    """The options as settings."""
    return replace(
        Settings(),
        slots=args.slots,
        groups=args.groups,
        samples_per_group=args.samples_per_group,
        warmup_rounds=args.warmup_rounds,
        rounds=args.rounds,
        over_provision=args.over_provision,
        seed=args.seed,
        variants=tuple(args.variants),
    )


async def run_all(url: str, settings: Settings, console: Console, started: float) -> tuple[list[Result], float]:
    """All variants, round by round in turn; also the seconds from the start of the demo to the first finished round."""
    first_groups = 0.0
    bars = Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds  {task.fields[rate]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with bars:
        total = settings.warmup_rounds + settings.rounds
        tasks = {name: bars.add_task(name, total=total, rate="") for name in settings.variants}

        def progress(done: int, result: Result) -> None:
            nonlocal first_groups
            first_groups = first_groups or time.monotonic() - started
            rate = "warming up"
            if result.rounds:
                seconds = sum(measured.seconds for measured in result.rounds)
                rate = f"{sum(measured.tokens for measured in result.rounds) / seconds:,.0f} delivered tokens/s"
            bars.update(tasks[result.name], completed=done, rate=rate)

        async with Engine(url) as engine:
            variants = [VARIANTS[name](engine, settings) for name in settings.variants]
            results = await run_interleaved(variants, Watch(engine), settings, progress)
    return results, first_groups


def main() -> int:
    """Runs the demo; 0 if all went well."""
    args = arguments()
    settings = settings_from(args)
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        attach = nullcontext(args.server) if args.server else None
        with attach or running_server(settings, args.out, console, args.server_options) as url:
            up = time.monotonic() - started
            results, first = asyncio.run(run_all(url, settings, console, started))
    except (ServerError, EngineError, httpx.HTTPError) as problem:
        console.print(f"[red]{problem or type(problem).__name__}")
        return 1
    rows = [figures(result, settings) for result in results]
    seconds = {"server_up": round(up, 1), "first_round": round(first, 1), "all": round(time.monotonic() - started, 1)}
    write_summary(args.out / "summary.json", rows, settings, seconds)
    draw_timeline(args.out / "running_batch.png", results, rows, settings)
    show_table(rows, settings, console)
    console.print(
        f"first groups after {first:.0f} s, all after {time.monotonic() - started:.0f} s (server up: {up:.0f} s)\n"
        f"figures: {args.out / 'summary.json'}\npicture: {args.out / 'running_batch.png'}",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
