"""Does learning suffer from staleness? Held-out reward after equal numbers of samples, variants paired over seeds.

    python -m bench.learning --budget-minutes 240        a new run; rows go to bench/results/learning.json
    python -m bench.learning --run-id ID                 continues a run: cells that have rows are not trained again
    python -m bench.learning --page                      the page from the rows: bench/results/learning.html

Every run is `python -m trainer_bridge --config FILE` against one server, from the demo's warm-up checkpoint on the
sorting task, with the same prompts in the same order, sampling seeds and samples per step. An interrupted run continues
from its checkpoint. A short run first measures the regime: if too few tokens are stale, the comparison would show
nothing, and the task must be made longer (`--longest`, a smaller `--groups`).
"""

import argparse
import itertools
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bench import record
from bench.learning_page import write_page
from bench.learning_stats import OFF_POLICY, OVER_THREE, in_regime, regime_of, run_metrics
from examples import interrupt
from examples.april_demo.server import ServerError, running_server
from examples.april_demo.settings import Settings, Training
from examples.sorting_task import ListLengths, problems, write_prompts
from trainer_bridge.progress import read_rows

CORRECTED = {"proximal": "trainer", "correction": "tis"}
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {"partial_rollout": False},
    "recompute": {"kv": "recompute", **CORRECTED, "proximal": "engine"},
    "keep": {"kv": "keep", **CORRECTED},
    # A forward for π_old nevertheless, so that the drift of kept KV is measured.
    "keep-uncorrected": {"kv": "keep", "proximal": "trainer", "correction": "none"},
    "cohort": {"kv": "keep", **CORRECTED, "quota_mode": "cohort"},
}
SEEDS = {"synchronous": 5, "recompute": 5, "keep": 5, "keep-uncorrected": 3, "cohort": 3}
HELD_OUT_SEED = 20_000
REGIME_STEPS = 30
"""Steps of the run that checks the regime; its second half counts."""
ABOUT_TO_END_S = 30.0


class RunFailed(RuntimeError):  # noqa: N818
    """A training run failed; the message names its output."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--budget-minutes", type=float, default=240.0, help="time limit, server start included (%(default)s)"
    )
    parser.add_argument("--run-id", help="continue this run")
    parser.add_argument(
        "--out",
        type=Path,
        default=record.RESULTS / "learning.json",
        help="file to which rows are appended (%(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, default=record.ROOT / "out" / "learning", help="folder of the training runs"
    )
    parser.add_argument("--server", metavar="URL", help="URL of a running server with the warm-up checkpoint")
    parser.add_argument(
        "--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), help="train only these variants"
    )
    parser.add_argument("--seeds", type=int, help="seeds per variant (default: five or three)")
    parser.add_argument("--steps", type=int, default=60, help="training steps per run (%(default)s)")
    parser.add_argument("--groups", type=int, default=4, help="quota of a round in groups (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="samples per group (%(default)s)")
    parser.add_argument(
        "--pool", type=int, default=32, help="prompts in the engine at the start of a round (%(default)s)"
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=128,
        help="samples that run at the same time; more slots make rounds shorter (%(default)s)",
    )
    parser.add_argument("--longest", type=int, default=320, help="longest list to sort (%(default)s)")
    parser.add_argument(
        "--alpha", type=float, default=1.0, help="exponent of the Pareto distribution of lengths (%(default)s)"
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=24,
        help="staleness bound in versions; a smaller bound makes rounds longer (%(default)s)",
    )
    parser.add_argument("--held-out", type=int, default=512, help="prompts per evaluation (%(default)s)")
    parser.add_argument("--eval-interval", type=int, default=5, help="steps between evaluations (%(default)s)")
    parser.add_argument("--lr", type=float, default=Training.lr, help="learning rate (%(default)s)")
    parser.add_argument(
        "--checkpoint", type=Path, default=Training().checkpoint, help="initial checkpoint (%(default)s)"
    )
    parser.add_argument("--anyway", action="store_true", help="train even if the rounds are not as stale as intended")
    parser.add_argument("--page", action="store_true", help="only write the page from the rows")
    return parser.parse_args(given)


SIZES = (
    *("steps", "groups", "samples", "pool", "slots", "longest", "alpha"),
    *("max_staleness", "held_out", "eval_interval", "lr"),
)


def plan(variants: list[str], seeds: int | None) -> Iterator[tuple[str, int]]:
    """(variant, seed) of all runs, seed by seed, so that any prefix is paired."""
    for seed in range(seeds or max(SEEDS.values())):
        for variant in variants:
            if seed < (seeds or SEEDS[variant]):
                yield variant, seed


def fields_of(variant: str, seed: int, args: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    """The configuration of one run, as in its YAML file."""
    synchronous = variant == "synchronous"
    return {
        "hf_checkpoint": str(args.checkpoint),
        "server": url,
        "run": f"learning-{variant}-{seed}",
        "save": str(folder / f"{variant}-{seed}"),
        "seed": seed,
        "rollout_seed": seed,
        "prompt_data": str(folder / f"prompts-{seed}.jsonl"),
        "eval_prompt_data": str(folder / "held_out.jsonl"),
        "eval_interval": args.eval_interval,
        "eval_temperature": 1.0,
        "num_rollout": args.steps,
        "save_interval": args.eval_interval,
        "on_end": "drop",
        "rollout_batch_size": args.groups,
        "over_sampling_batch_size": args.groups if synchronous else args.pool,
        "n_samples_per_prompt": args.samples,
        "rollout_max_response_len": args.longest + 32,
        "reward": "examples.sorting_task:reward",
        "reward_workers": 1,
        "max_staleness": args.max_staleness,
        "lr": args.lr,
        "adam_beta2": 0.95,
        "train_dtype": "float32",
        "trainer_device": "cpu",
        "push": "tensor",
        **VARIANTS[variant],
    }


def write_data(args: argparse.Namespace, seed: int, folder: Path) -> None:
    """The prompts of a seed, and the held-out prompts that all seeds share."""
    lengths = ListLengths(longest=args.longest, alpha=args.alpha)
    train = itertools.islice(problems(seed, lengths), args.steps * args.groups + args.pool)
    write_prompts(folder / f"prompts-{seed}.jsonl", train)
    held_out = itertools.islice(problems(HELD_OUT_SEED, lengths), args.held_out)
    write_prompts(folder / "held_out.jsonl", held_out)


def train(fields: dict[str, Any], console: Console, limit_s: float) -> bool:
    """Train one run; returns False if the time is up (it can be continued).

    Raises:
        RunFailed: the training process ended with an error.
    """
    folder = Path(fields["save"])
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "config.yaml", folder / "train.log"
    config.write_text(yaml.safe_dump(fields, sort_keys=False))
    with log.open("ab") as sink:
        command = [sys.executable, "-m", "trainer_bridge", "--config", str(config)]
        process = subprocess.Popen(command, cwd=record.ROOT, stdout=sink, stderr=subprocess.STDOUT)
        try:
            code = process.wait(max(limit_s, ABOUT_TO_END_S))
        except subprocess.TimeoutExpired:
            console.print(f"{folder.name}: out of time after {len(read_rows(folder / 'steps.jsonl'))} steps")
            return False
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code:
        lines = log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
        raise RunFailed(f"{folder.name} ended with code {code}: {lines[-1]}\noutput: {log}")
    return True


class Bench:
    """One run of the benchmark: server, folder, rows and time budget."""

    def __init__(self, args: argparse.Namespace, url: str, ends_at: float, console: Console) -> None:
        self._args, self._url, self._ends_at, self._console = args, url, ends_at, console
        self.run_id = args.run_id
        self._folder = args.folder.resolve() / self.run_id
        self._sizes = {name: getattr(args, name) for name in SIZES}

    def rows(self) -> list[record.Row]:
        """Rows of this run so far."""
        found = [row for row in record.read_rows(self._args.out) if row["run_id"] == self.run_id]
        if any(row["sizes"] != self._sizes for row in found):
            raise RunFailed(f"run {self.run_id} was measured with other sizes: {found[0]['sizes']}")
        return found

    def regime(self) -> bool:
        """Whether staleness is large enough to compare, by a row of this run or a short training run."""
        rows = [row for row in self.rows() if row["kind"] == "regime"]
        if not rows:
            fields = self._fields("keep", 0) | {"num_rollout": REGIME_STEPS, "save": str(self._folder / "regime")}
            del fields["eval_interval"], fields["eval_prompt_data"]
            if not train(fields | {"save_interval": REGIME_STEPS}, self._console, self._left()):
                return False
            steps = read_rows(self._folder / "regime" / "steps.jsonl")
            rows = [self._append("regime", "keep", 0, regime_of(steps[len(steps) // 2 :]))]
        seen = rows[-1]["off_policy_share"], rows[-1]["over_three_versions"]
        self._console.print(f"regime: {seen[0]:.0%} of the tokens stale, {seen[1]:.0%} of samples over ≥ 3 versions")
        return in_regime(*seen)

    def all(self) -> None:
        """Train every planned run that has no row yet, until the time is up."""
        for variant, seed in plan(self._args.variants, self._args.seeds):
            if any((row["kind"], row["variant"], row["seed"]) == ("run", variant, seed) for row in self.rows()):
                continue
            fields = self._fields(variant, seed)
            if self._left() < ABOUT_TO_END_S or not train(fields, self._console, self._left()):
                return
            row = self._append("run", variant, seed, run_metrics(Path(fields["save"])))
            self._console.print(
                f"{variant}, seed {seed}: held-out {row['reward_before']:.3f} → {row['reward_final']:.3f} "
                f"in {row['seconds']:.0f} s"
            )

    def _fields(self, variant: str, seed: int) -> dict[str, Any]:
        write_data(self._args, seed, self._folder)
        return fields_of(variant, seed, self._args, self._url, self._folder)

    def _append(self, kind: str, variant: str, seed: int, found: record.Row) -> record.Row:
        row = {"bench": "learning", "run_id": self.run_id, "kind": kind, "variant": variant, "seed": seed}
        row |= {**record.provenance(), "sizes": self._sizes, **found}
        record.append_rows(self._args.out, [row])
        return row

    def _left(self) -> float:
        return self._ends_at - time.monotonic()


def main(given: list[str] | None = None) -> int:
    """Returns 0, 1 if a run failed, or 2 outside of the regime."""
    args, console = arguments(given), Console()
    ends_at = time.monotonic() + 60 * args.budget_minutes
    args.run_id = args.run_id or f"{time.strftime('%Y%m%d')}-{uuid.uuid4().hex[:6]}"
    page = args.out.with_suffix(".html")
    if args.page:
        console.print(str(write_page(record.read_rows(args.out), page)))
        return 0
    console.print(f"run {args.run_id}")
    try:
        with ExitStack() as stack:
            (args.folder / args.run_id).mkdir(parents=True, exist_ok=True)
            settings = Settings(slots=args.slots, groups=args.groups)
            url = args.server or stack.enter_context(running_server(settings, args.folder / args.run_id, console, []))
            bench = Bench(args, url, ends_at, console)
            if not bench.regime() and not args.anyway:
                console.print(
                    f"needed: {OFF_POLICY:.0%} and {OVER_THREE:.0%}. Lengthen the task (--longest, a smaller --alpha "
                    "or --groups, a larger --pool), or train all the same (--anyway)"
                )
                return 2
            bench.all()
    except (RunFailed, ServerError) as problem:
        console.print(f"[red]{problem}")
        return 1
    console.print(str(write_page(record.read_rows(args.out), page)))
    return 0


if __name__ == "__main__":
    interrupt.run(main, "finished runs are in bench/results/learning.json; --run-id continues")
