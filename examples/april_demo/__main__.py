"""Command line of the demo: ``python -m examples.april_demo --help``."""

from __future__ import annotations

import argparse
import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.rollout.engine_client import EngineClient
from examples import interrupt
from examples.april_demo.other_load import other_load
from examples.april_demo.report import (
    draw_learning,
    draw_timeline,
    show_table,
    show_training,
    title,
    write_summary,
)
from examples.april_demo.rounds import VARIANTS, Result, make_variants, metrics, run_interleaved
from examples.april_demo.server import has_gpu, running_servers
from examples.april_demo.settings import AGENT_TRAINING, ROOT, Settings, Training
from examples.april_demo.training import (
    TRAINED,
    Trained,
    configuration,
    import_trainer,
    prepare,
    train_in_turns,
    training_metrics,
)
from sglang_april.client import AprilError

Row = dict[str, Any]
FAILURES = (ImportError, OSError, RuntimeError, ValueError, AprilError, httpx.HTTPError, aiohttp.ClientError)
"""What the server, the engine's routes and the trainer raise, each with a message that names the reason."""


BUSY_PERCENT = 20.0
"""Share of all cores in use by other processes above which rates are lower and vary between runs."""


def busy_warning(percent: float) -> str:
    """A warning if other processes use this share of the machine; empty if they use little."""
    if percent <= BUSY_PERCENT:
        return ""
    return (
        f"other processes used {percent:.0f} % of the cores at the start: rates are lower than on an idle machine; "
        "their ratios suffer less, because the variants take turns"
    )


def next_steps(out: Path, *, trained: bool) -> str:
    """Commands to try after the demo."""
    report = f"  april-train report {out / 'training' / 'april'}    a page about the training run\n" if trained else ""
    return (
        f"next, in .venv (source .venv/bin/activate):\n{report}"
        "  docs/quickstart.md    a server, a round, a push, and training with a reward of your own\n"
        "  make bench BENCH_ARGS='--budget-minutes 10 --out out/bench/rows.json'\n"
        "                        all kinds of rollouts against each other; an hour by default, into bench/results"
    )


def arguments() -> argparse.Namespace:
    """The options; unknown ones behind ``--`` go to the server."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m examples.april_demo",
        description="Runs rollout rounds with weight updates three ways: waiting for all, APRIL from a client, and a "
        "batch quota in the engine. Then trains the tiny model twice, waiting for all and with the quota. Writes "
        "tables, pictures and out/demo/summary.json.",
        epilog="Options after -- are passed to the server, for example: -- --attention-backend triton",
    )
    parser.add_argument(
        "--agent",
        action="store_true",
        help="instead train an agent with a calculator on trajectories of several turns, twice: waiting for all, and "
        "with a quota of trajectories",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="use a running server (started with the demo's model); the training runs then follow each other",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="folder for the results")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="measured rounds (%(default)s)")
    parser.add_argument(
        "--warmup-rounds", type=int, default=default.warmup_rounds, help="rounds before the measured ones (%(default)s)"
    )
    parser.add_argument("--groups", type=int, default=default.groups, help="groups per round (%(default)s)")
    parser.add_argument(
        "--samples-per-group", type=int, default=default.samples_per_group, help="samples per group (%(default)s)"
    )
    parser.add_argument(
        "--slots", type=int, default=default.slots, help="samples that run at the same time (%(default)s)"
    )
    parser.add_argument(
        "--over-provision",
        type=float,
        default=default.over_provision,
        help="over-sampling factor of the client-side baseline (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of prompts and sampling (%(default)s)")
    help_texts = {
        "steps": "training steps; 0 skips the training",
        "groups": "groups per training step",
        "held_out": "problems per evaluation",
    }
    for flag, what in help_texts.items():
        sizes = f"{getattr(default.training, flag)}; with --agent {getattr(AGENT_TRAINING, flag)}"
        name = "train-groups" if flag == "groups" else flag.replace("_", "-")
        parser.add_argument(f"--{name}", type=int, metavar="N", dest=f"train_{flag}", help=f"{what} ({sizes})")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(default.variants))
    parser.add_argument("server_options", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def settings_from(args: argparse.Namespace) -> Settings:
    """The options as settings."""
    sizes = {name: getattr(args, f"train_{name}") for name in ("steps", "groups", "held_out")}
    given = {name: size for name, size in sizes.items() if size is not None}
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
        training=replace(AGENT_TRAINING if args.agent else Training(), **given),
        agent=args.agent,
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
                rate = f"{result.tokens / result.seconds:,.0f} delivered tokens/s"
            bars.update(tasks[result.name], completed=done, rate=rate)

        async with EngineClient(url, patched=True) as engine:
            results = await run_interleaved(make_variants(engine, settings), engine, settings, progress)
    return results, first_groups


def run_rounds(url: str, settings: Settings, out: Path, console: Console, started: float) -> tuple[list[Row], float]:
    """First part: the variants' rounds in turn; their rows, and the seconds to the first finished round."""
    results, first = asyncio.run(run_all(url, settings, console, started))
    rows = [metrics(result, settings) | training_metrics(None) for result in results]
    draw_timeline(out / "running_batch.png", results, rows, settings)
    return rows, first


def run_training(urls: list[str], rows: list[Row], settings: Settings, out: Path, console: Console) -> None:
    """Second part: the training runs, each of which fills the row of its variant.

    With a server for each they take turns; otherwise they follow each other on the first one.
    """
    by_variant = {row["variant"]: row for row in rows}
    names = [name for name in TRAINED if name in by_variant]
    data, trained = prepare(settings, out), dict[str, Trained]()
    for together in [names] if len(urls) >= len(names) else [[name] for name in names]:
        console.rule(f"training: {' and '.join(together)}{', one step each in turn' if len(together) > 1 else ''}")
        configs = {
            name: configuration(name, url, settings, data, out, on_gpu=has_gpu())
            for name, url in zip(together, urls, strict=False)
        }
        with other_load() as others:
            trained |= train_in_turns(configs, console)
        for name in together:
            by_variant[name].update(training_metrics(trained[name], others.share))
        draw_learning(out / "learning.png", trained, {name: title(name, settings) for name in trained})


def main() -> int:
    """Run the demo; returns 0 on success."""
    args = arguments()
    settings = settings_from(args)
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    if busy := busy_warning(psutil.cpu_percent(interval=1.0)):
        console.print(f"note: {busy}", style="yellow")
    started = time.monotonic()
    trains = settings.training.steps > 0 and not set(TRAINED).isdisjoint(settings.variants)
    if settings.agent and not trains:
        console.print(
            "--agent trains: it needs --steps above 0, and synchronous or april among --variants", style="red"
        )
        return 2
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    part, failure = "the server", ""
    try:
        imports = ThreadPoolExecutor(1).submit(import_trainer) if trains else None
        count = max(1, len(set(TRAINED) & set(settings.variants))) if trains else 1
        attach = nullcontext([args.server]) if args.server else None
        with attach or running_servers(count, settings, args.out, console, args.server_options) as urls:
            seconds["server_up"] = time.monotonic() - started
            if imports:
                part = "the trainer's import"
                imports.result()  # not while rounds are timed
            if settings.agent:
                rows = [{"variant": name, **training_metrics(None)} for name in TRAINED if name in settings.variants]
            else:
                part = "the rounds"
                rows, seconds["first_round"] = run_rounds(urls[0], settings, args.out, console, started)
            if trains:
                part = "training"
                run_training(urls, rows, settings, args.out, console)
    except FAILURES as problem:
        failure = f"{part} failed: {problem or type(problem).__name__}"
    seconds["all"] = time.monotonic() - started
    if rows:
        write_summary(args.out / "summary.json", rows, settings, seconds)
        if not settings.agent:
            show_table(rows, settings, console)
        show_training(rows, settings, console)
        if busy:
            console.print(f"note: {busy}", style="yellow")
    if failure:
        console.print(failure, style="red", markup=False)
        return 1
    names = [*([] if settings.agent else ["running_batch.png"]), *(["learning.png"] if trains else [])]
    pictures = [args.out / name for name in names]
    first = f"first groups after {seconds['first_round']:.0f} s, " if "first_round" in seconds else ""
    console.print(
        f"{first}all after {seconds['all']:.0f} s "
        f"(server up: {seconds['server_up']:.0f} s)\nfigures: {args.out / 'summary.json'}\n"
        f"pictures: {', '.join(map(str, pictures))}\n{next_steps(args.out, trained=trains)}",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    interrupt.run(main, "the servers have exited; the next call starts the demo from the beginning")
