"""Command line: ``python -m bench.rollout --help``. Rows are appended as they are measured."""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import httpx

from bench import record
from bench.random_checkpoint import two_policies
from bench.rollout.engine_client import EngineClient, EngineError
from bench.rollout.limit import NeverFullError
from bench.rollout.metrics import IdentityError
from bench.rollout.presets import PRESETS, Cell, Paced, Preset
from bench.rollout.runner import KINDS, Runner
from bench.rollout.servers import ServerError, Size, both_servers
from bench.rollout.testbed import Testbed
from examples import interrupt

PROBLEMS = (ServerError, EngineError, NeverFullError, IdentityError, httpx.HTTPError, aiohttp.ClientError)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rollout",
        description="Rollout rounds with real weight pushes between them, for every variant, in the steady state.",
    )
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), default="cpu", help="preset of sizes and tables (%(default)s)"
    )
    parser.add_argument(
        "--budget-minutes", type=float, default=60.0,
        help="time limit, server start included (%(default)s); below 30 the main table has three repetitions",
    )  # fmt: skip
    parser.add_argument(
        "--run-id", help="continue this run: cells that it has with this preset, configuration and GPU are not repeated"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=record.RESULTS / "rollout.json",
        help="file to which rows are appended (%(default)s)",
    )
    parser.add_argument("--variants", nargs="+", choices=tuple(KINDS), help="measure only these variants")
    parser.add_argument(
        "--ablation", help="measure only the tables of this ablation, e.g. over-sampling, knobs, drain, 'n 8'"
    )
    parser.add_argument(
        "--distribution", help="measure this length distribution instead of the preset's cells, e.g. trace:lengths.json"
    )
    parser.add_argument("--repetitions", type=int, help="repetitions of the main table")
    parser.add_argument(
        "--warm-rounds", type=int, help="rounds after which measuring begins even if the carry is not steady"
    )
    parser.add_argument(
        "--over-sampling", type=float, help="over-sampling factor of client-side variants for which none is measured"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and lengths (%(default)s)")
    parser.add_argument("--gpu-gb", type=float, help="memory in GB of the GPU that a /8 preset is for (default: 141)")
    parser.add_argument("--pace", type=Path, help="step times of a paced preset (default: Qwen3-4B on one H100)")
    parser.add_argument(
        "--checkpoints", nargs=2, type=Path, metavar="DIR", help="checkpoints of two policies of one model"
    )
    parser.add_argument("--server", metavar="URL", help="URL of a running patched server, used for all variants")
    parser.add_argument("--stock-server", metavar="URL", help="with --server: URL of a stock server for the baselines")
    parser.add_argument("--server-options", default="", help="more flags for both servers, in one string")
    return parser.parse_args(given)


def preset_of(args: argparse.Namespace) -> Preset:
    """The preset with the changes that the options make."""
    preset = PRESETS[args.preset]
    preset, paced = _paced(args, preset), isinstance(preset, Paced)
    if preset.shape != "tiny" and not paced and not preset.name.endswith("/8") and not args.server:
        raise SystemExit(
            f"preset {preset.name}: two servers with room for {preset.pool_tokens:,} KV tokens each fit on no GPU; "
            f"start them and name them (--server, --stock-server), or take {preset.name}/8"
        )
    if args.gpu_gb:
        if not args.preset.endswith("/8") or paced:
            raise SystemExit("--gpu-gb: only the /8 presets are sized by a GPU's memory")
        preset = PRESETS[args.preset.removesuffix("/8")].eighth(args.gpu_gb)
        if preset.pool < 4 * preset.context:
            raise SystemExit(f"--gpu-gb {args.gpu_gb:g}: too little for two servers with Qwen3-0.6B")
    if args.repetitions:
        preset = replace(preset, repetitions=args.repetitions)
    elif args.budget_minutes < 30:
        preset = replace(preset, repetitions=min(3, preset.repetitions))
    if args.warm_rounds:
        preset = replace(preset, warm_limit=args.warm_rounds)
    if args.over_sampling:
        preset = replace(preset, plan=replace(preset.plan, over_sampling=args.over_sampling))
    if args.distribution:
        try:
            longest = preset.lengths(args.distribution).longest
        except (ValueError, OSError, IndexError, TypeError) as problem:
            raise SystemExit(f"--distribution {args.distribution}: {problem}") from problem
        preset = replace(preset, longest=max(preset.longest, longest))
    return preset


def _paced(args: argparse.Namespace, preset: Preset) -> Preset:
    """The preset with another table of step times, if one is named."""
    if not isinstance(preset, Paced):
        if args.pace:
            raise SystemExit(f"--pace: preset {preset.name} runs at this machine's own speed")
        return preset
    if args.server:
        raise SystemExit("--server: whether a running server is paced is not known; a paced preset starts its own")
    return replace(preset, pace=args.pace) if args.pace else preset


def cells_of(args: argparse.Namespace, preset: Preset, done: list[record.Row]) -> list[Cell]:
    """Cells without a row in `done`."""
    cells = list(preset.cells())
    if args.distribution:
        cells = [Cell(args.distribution, v, r) for r in range(preset.repetitions) for v in args.variants or KINDS]
    if args.variants:
        cells = [cell for cell in cells if cell.variant in args.variants]
    if args.ablation:
        chosen = [cell for cell in cells if args.ablation in (cell.ablation, cell.together)]
        tried = {_tried(cell, preset) for cell in chosen if not cell.variant.startswith("april")}
        cells = [cell for cell in cells if cell in chosen or (cell.tries and _tried(cell, preset) in tried)]
    whole = [row for row in done if row.get("rounds", preset.measured) >= preset.measured]
    have = {(row["distribution"], row["variant"], row["ablation"], row["repetition"]) for row in whole}
    return [cell for cell in cells if (cell.distribution, cell.variant, cell.ablation, cell.repetition) not in have]


def measured_before(args: argparse.Namespace, preset: Preset) -> list[record.Row]:
    """The run's rows, if they have this preset and configuration and are of this machine's GPU."""
    wanted = (args.run_id, preset.name, configuration(args, preset), record.gpu_name())
    rows = [row for row in record.read_rows(args.out) if row.get("run_id") == args.run_id]
    return [row for row in rows if _identity(row) == wanted]


def _identity(row: record.Row) -> tuple[object, ...]:
    return row["run_id"], row["preset"], row["configuration"], row["machine"]["gpu"]


def _tried(cell: Cell, preset: Preset) -> tuple[str, str, int]:
    """(variant, distribution, n) for which over-sampling factors are compared."""
    return cell.variant.removesuffix("-retry3s"), cell.distribution, (cell.plan or preset.plan).n


def checkpoints_of(args: argparse.Namespace, preset: Preset, folder: Path) -> tuple[Path, Path]:
    """Two checkpoints that are pushed alternately."""
    if args.checkpoints:
        return args.checkpoints[0], args.checkpoints[1]
    if preset.shape != "tiny" and not isinstance(preset, Paced):
        raise SystemExit(f"preset {preset.name} needs --checkpoints A B: two checkpoints of a {preset.shape} shape")
    return two_policies(folder, preset.shape)


def configuration(args: argparse.Namespace, preset: Preset) -> record.Row:
    """Configuration stored with each row, in addition to its plan."""
    sizes = {key: getattr(preset, key) for key in ("shape", "mean", "longest", "prompt_tokens", "warm_limit")}
    pool = None if args.server else preset.pool_tokens
    if isinstance(preset, Paced):
        sizes |= {"paced": preset.table.name, "limit": "by the table"}
    return {**sizes, "pool_tokens": pool, "seed": args.seed, "server_options": args.server_options}


def changed(args: argparse.Namespace) -> list[str]:
    """Options that change the preset; tables use only rows without any."""
    names = ["distribution", "over_sampling", "warm_rounds", "seed"]
    if args.preset.startswith("april-paced"):
        names += ["pace", "server_options", "checkpoints"]
    else:
        names.append("variants")
        if PRESETS[args.preset].shape == "tiny":
            names += ["server", "server_options", "checkpoints"]
    return [name for name in names if getattr(args, name)]


def line(row: record.Row) -> str:
    """One line of output for a row."""
    marks = ("" if row["steady"] else " not-steady") + (" biased" if row["biased"] else "")
    name = f"{row['distribution']:<12} {row['variant']:<16} {row['ablation'] or '':<20} rep {row['repetition']}"
    return (
        f"{name} {row['delivered_tokens_per_s']:9.0f} tokens/s {row['delivered_groups_per_s']:7.2f} groups/s "
        f"{row['share_of_limit']:.3f} of the limit, carry {row['carry_end']}, KS {row['ks_distance']:.3f}{marks}"
    )


def _pace(preset: Preset) -> Path | None:
    return preset.pace.absolute() if isinstance(preset, Paced) else None


async def measure(args: argparse.Namespace, preset: Preset, urls: tuple[str, str], folder: Path, until: float) -> int:
    """Run the cells that fit into the time budget; returns the number of cells left out."""
    done = measured_before(args, preset)
    cells = cells_of(args, preset, done)

    def keep(row: record.Row) -> None:
        record.append_rows(args.out, [row])
        print(line(row), flush=True)

    limit = preset.limit(args.distribution or "lognormal") if isinstance(preset, Paced) else None
    async with EngineClient(urls[0], patched=urls[0] == urls[1]) as stock, EngineClient(urls[1], patched=True) as april:
        testbed = Testbed(stock, april, checkpoints_of(args, preset, folder), preset, args.seed, limit)
        for row in done:
            testbed.note(row)
        common = {**record.provenance(), "configuration": configuration(args, preset), "changed": changed(args)}
        return await Runner(testbed, common, args.run_id, keep).run(cells, until)


def main(given: list[str] | None = None) -> int:
    """Returns 0 if no cell failed, even if the budget was too short for all of them."""
    args = arguments(given)
    until = time.monotonic() + 60 * args.budget_minutes
    preset = preset_of(args)
    if not list(cells_of(args, preset, [])):
        raise SystemExit("no table of this preset has that ablation, distribution or variant")
    args.run_id = args.run_id or f"{preset.name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    print(f"run {args.run_id}: rows go to {args.out} as they are measured; --run-id continues it", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="april-bench-")))
        try:
            if args.server:
                urls = args.stock_server or args.server, args.server
            else:
                model, _ = checkpoints_of(args, preset, folder)
                extra = tuple(args.server_options.split())
                size = Size(model, preset.plan.slots, preset.context, preset.pool_tokens, extra, pace=_pace(preset))
                urls = stack.enter_context(both_servers(size, Path("out") / "bench"))
            left = asyncio.run(measure(args, preset, urls, folder, until))
        except PROBLEMS as problem:
            print(str(problem) or type(problem).__name__, file=sys.stderr)
            return 1
    print(f"rows of run {args.run_id}: {args.out}")
    if left:
        print(f"the budget was too small for {left} cells; continue with --run-id {args.run_id}")
    return 0


if __name__ == "__main__":
    interrupt.run(main, "rows that were measured are kept; --run-id, as printed at the start, continues the run")
