"""A discrete-event model of engines and of rounds on them: validation against rows, and projections.

    python -m bench.simulate measure              # step costs of this machine -> out/bench/costs.json (a quiet machine)
    python -m bench.simulate validate             # against the newest rows of bench.rollout, with the costs found there
    python -m bench.simulate reach                # where the time of a round goes, and what changes would gain
    python -m bench.simulate project              # APRIL's setting, 64 and 1024 GPUs, 32k to 128k (ten minutes)

The model is bench/simulated_rounds.py, on engines as in bench/simulated_engine.py. Without --costs, `reach` uses the
costs measured beside the newest main table's rows, and `project` the assumed costs of an H100.
"""

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

from bench import record
from bench.rollout.engine_client import EngineClient
from bench.rollout.presets import LIKELY, PRESETS, Preset
from bench.rollout.servers import Size, stock_server
from bench.rollout.testbed import Testbed
from bench.rollout.variant import Plan
from bench.rollout.workload import Stream
from bench.simulated_engine import Costs
from bench.simulated_rounds import MEASURED, VARIANTS, WARM, Outcome, Simulation
from bench.tables import by_variant, newest
from examples import interrupt
from examples.tiny_model import make
from sglang_april.scheduler.admission import PrefillBatcher

COSTS = record.ROOT / "out" / "bench" / "costs.json"
WITHIN = 0.10
MOST_S = 0.05
"""Upper bound of the fitted costs `finish_s` and `follow_s`."""
BATCHING = (0.0, 0.25, 0.5, 1.0, 2.0)
"""Values of `PrefillBatcher.STEPS` to compare; 0: a prefill whenever a sample ends."""
PROBES = 6
SIMULATED = ("synchronous", "outside", "april-keep", "april-recompute")


ROUNDS = ((32, (WARM, MEASURED)), (256, (8, 12)), (math.inf, (5, 5)))
"""(largest number of engines, (warm-up rounds, measured rounds))."""
PROJECTED = (*LIKELY, 4.0, 6.0)
"""Over-sampling factors of `outside` that are compared in projected settings."""
LONG_ROUNDS = 3
"""Warm-up rounds, in multiples of the rounds that the longest response takes."""


def simulated(
    preset: Preset,
    plan: Plan,
    variant: str,
    costs: Costs,
    batching: float = PrefillBatcher.STEPS,
    engines: int = 1,
    distribution: str = "lognormal",
) -> Outcome:
    """Simulate one variant on a preset's workload; with many engines, fewer rounds suffice."""
    lengths = preset.lengths(distribution)
    model = Simulation(variant, plan, Stream(0, lengths, plan.n, preset.prompt_tokens), costs, batching, engines)
    warm, measured = next(rounds for most, rounds in ROUNDS if engines <= most)
    steps = plan.samples * lengths.mean / (plan.slots * engines)  # of a round with full batches
    return model.run(max(warm, math.ceil(LONG_ROUNDS * lengths.grid[-1] / steps)), measured)


def context_of(preset: Preset, distribution: str = "lognormal") -> float:
    """Mean KV tokens of a running sample: the prompt and half its length-biased length."""
    return preset.prompt_tokens + preset.lengths(distribution).running_mean / 2


def validate(preset: Preset, rows: list[record.Row]) -> list[record.Row]:
    """Predicted against measured delivered tokens/s of each variant: means over the repetitions, each predicted with
    the step costs measured during its rounds.

    No probe measures `finish_s`, and none of a stock server measures `follow_s`. They are fitted on the first half of
    the rows of `outside` and `april-keep`, which are then excluded; everything else is predicted."""
    table = by_variant(newest(rows, preset.name), "lognormal")
    table = {name: [row for row in table[name] if row.get("costs")] for name in VARIANTS if name in table}
    fitted: dict[str, float] = {}
    for name, cost in (("outside", "finish_s"), ("april-keep", "follow_s")):
        half = len(table.get(name, [])) // 2
        if half:
            fitted[cost] = mean(fitted_cost(preset, row, cost, fitted) for row in table[name][:half])
            table[name] = table[name][half:]
    made = []
    for variant, known in table.items():
        if not known:
            continue
        measured = mean(row["delivered_tokens_per_s"] for row in known)
        model = mean(_modelled(preset, row, fitted) for row in known)
        unfitted = mean(_modelled(preset, row, {}) for row in known) / measured
        ratio = model / measured
        row = {"variant": variant, "of_run": known[-1]["run_id"], "measured": measured, "model": model}
        row |= {"ratio": ratio, "within": _near(ratio), "ratio_without_fit": unfitted}
        made.append(row | {f"{cost.removesuffix('_s')}_ms": 1e3 * seconds for cost, seconds in fitted.items()})
    return made


def fitted_cost(preset: Preset, row: record.Row, cost: str, others: dict[str, float]) -> float:
    """The value of one of the `Costs` (at most `MOST_S` seconds) at which the model delivers the measured rate; 0 if
    the model is slower without it."""
    low, high = 0.0, MOST_S
    for _ in range(14):
        middle = (low + high) / 2
        more = _modelled(preset, row, {**others, cost: middle}) > row["delivered_tokens_per_s"]
        low, high = (middle, high) if more else (low, middle)
    return low


def _modelled(preset: Preset, row: record.Row, fitted: dict[str, float]) -> float:
    costs = replace(Costs(**row["costs"]), **fitted)
    return simulated(preset, Plan(**row["plan"]), row["variant"], costs).rate


def _near(ratio: float) -> bool:
    return abs(ratio - 1) <= WITHIN


def reach(preset: Preset, costs: Costs) -> list[record.Row]:
    """Where a round's time goes, and the effect of possible changes, as shares of the full-batch rate."""
    usual = float(PrefillBatcher.STEPS)
    cases = [(variant, costs, usual, "as it is") for variant in SIMULATED]
    cases += [("april-keep", costs, batching, f"if a prefill counted as {batching:g} steps") for batching in BATCHING]
    free = replace(costs, prefill_s=0.0, prefill_sample_s=0.0, prefill_token_s=0.0)
    cases.append(("april-keep", free, 0.0, "if prefills were free"))
    cases.append(("april-keep", replace(costs, push_s=0.0, gap_s=0.0), usual, "if rounds had no gap"))
    flat = replace(costs, step_s=costs.decode(preset.plan.slots, 0), row_s=0.0)
    cases += [(variant, flat, usual, "if a step took as long with fewer rows") for variant in SIMULATED]
    made = []
    for variant, changed, batching, what in cases:
        out = simulated(preset, preset.plan, variant, changed, batching)
        parts = {"decode": out.decode_s, "prefill": out.prefill_s, "between": out.between_s}
        shares = {name: seconds / out.seconds for name, seconds in parts.items()}
        limit = changed.full_rate(preset.plan.slots, context_of(preset))
        made.append({"variant": variant, "what": what, "share_of_limit": out.rate / limit, **shares})
    return made


H100_4B = Costs(
    step_s=5e-3, row_s=8e-6, kv_token_s=4.8e-8, prefill_s=5e-3, prefill_token_s=2e-5, push_s=3.0, gap_s=0.05,
    abort_s=0.5, join_s=1e-5,
)  # fmt: skip
"""Assumed, not measured: Qwen3-4B in bf16 on one H100. A decode step reads 8 GB of weights at 2.5 TB/s and launches its
kernels (5 ms), and 144 KiB of KV a token at 3 TB/s (4.8e-8 s); a prefill runs at 50k tokens/s; a push takes 3 s; a
client needs half a second to abort, collect and resend."""


H100_4B_TOKENS = 420_000
"""KV tokens that fit into such a GPU: 144 KiB each in 90 % of 80 GB, minus the weights and 2 GB."""
MOVE_S = 144 * 1024 / 25e9
"""Copying a KV token to the host or back at 25 GB/s without overlap, for a trainer that needs all memory of the GPU."""


def project(costs: Costs) -> Iterator[record.Row]:
    """Projected rates under the assumed `costs`: each GPU is an engine with slots for its share of the samples (or for
    as many as fit into its memory), and one quota spans all engines."""
    moved = replace(costs, move_token_s=MOVE_S)
    april = PRESETS["april"]
    usual, extreme = "lognormal", f"extreme:{april.extreme}"
    long = april.extreme_short * april.extreme
    cases = [("APRIL: 8 GPUs, 32 groups × 8, 16k", 8, april, costs, usual)]
    cases += [(f"{cases[0][0]}, KV moved to the host and back", 8, april, moved, usual)]
    cases += [(f"8 GPUs, 32 groups × 8, 5 % of {long:,} tokens, 95 % of 32", 8, april, costs, extreme)]
    for gpus, context in ((64, 32), (64, 128), (1024, 32), (1024, 128)):
        plan = replace(april.plan, groups=8 * gpus)
        wide = replace(april, mean=context * 256.0, longest=context * 1024, plan=plan)
        cases.append((f"{gpus} GPUs, {plan.groups} groups × 8, {context}k", gpus, wide, costs, usual))
    for what, gpus, preset, given, distribution in cases:
        yield {"what": what, **_projected(gpus, preset, given, distribution)}


def _projected(gpus: int, preset: Preset, costs: Costs, distribution: str) -> record.Row:
    context = context_of(preset, distribution)
    plan = replace(preset.plan, slots=min(preset.plan.samples // gpus, int(H100_4B_TOKENS / context)))

    def rate(variant: str, factor: float = plan.over_sampling) -> float:
        sizes = replace(plan, over_sampling=factor)
        return simulated(preset, sizes, variant, costs, engines=gpus, distribution=distribution).rate

    rates = {variant: rate(variant) for variant in SIMULATED if variant != "outside"}
    factors = {factor: rate("outside", factor) for factor in PROJECTED}
    best = max(factors, key=lambda factor: factors[factor])
    april, rates["outside"] = rates["april-keep"], factors[best]
    return {
        "slots": plan.slots,
        "over_synchronous": april / rates["synchronous"],
        "over_outside": april / rates["outside"],
        "outside_factor": best,
        "recompute_over_outside": rates["april-recompute"] / rates["outside"],
        "share": april / costs.full_rate(plan.slots, context),
    }


def measure(url: str | None, checkpoint: Path | None, preset: Preset) -> Costs:
    """Step costs of the stock server at `url`, or of one started with a tiny model."""
    with ExitStack() as stack:
        if checkpoint is None:
            checkpoint = make(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="april-bench-"))), seed=0)
        if url is None:
            size = Size(checkpoint, preset.plan.slots, preset.context, preset.pool_tokens)
            url = stack.enter_context(stock_server(size, record.ROOT / "out" / "bench"))
        return asyncio.run(_probes(url, checkpoint, preset))


async def _probes(url: str, checkpoint: Path, preset: Preset) -> Costs:
    async with EngineClient(url, patched=False) as engine:
        testbed = Testbed(engine, engine, (checkpoint, checkpoint), preset)
        for _ in range(PROBES):
            await testbed.probe("lognormal")
    return testbed.observed.costs()


def costs_of(rows: list[record.Row], preset: Preset) -> Costs:
    """Mean step costs over the newest main table of a preset with log-normal lengths."""
    keep = by_variant(newest(rows, preset.name), "lognormal").get("april-keep", [])
    table = [row["costs"] for row in keep if row.get("costs")]
    if not table:
        raise SystemExit(f"no rows of preset {preset.name} with costs: run bench.rollout, or give --costs")
    return Costs(**{name: mean(costs[name] for costs in table) for name in table[0]})


def main(given: list[str] | None = None) -> int:
    """Returns the exit status; `validate` fails without rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "what",
        choices=("measure", "validate", "reach", "project"),
        help="measure step costs; validate the model against rows; reach: where the time goes; project to large runs",
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu", help="preset of sizes (%(default)s)")
    parser.add_argument(
        "--costs", type=Path, help="step times written by `measure` (default: those of the rows, or of an H100)"
    )
    parser.add_argument("--server", metavar="URL", help="measure: a running stock server (default: one is started)")
    parser.add_argument("--checkpoint", type=Path, help="measure: checkpoint that is pushed")
    parser.add_argument(
        "--rows", type=Path, default=record.RESULTS / "rollout.json", help="measured rows (%(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=record.RESULTS / "simulate.json",
        help="file to which rows are appended (%(default)s)",
    )
    args = parser.parse_args(given)
    preset = PRESETS[args.preset]
    if args.what == "measure":
        if args.server and not args.checkpoint:
            parser.error("--server needs --checkpoint, of the same model")
        costs = measure(args.server, args.checkpoint, preset)
        out = args.costs or COSTS
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(asdict(costs), indent=2) + "\n")
        print(out.read_text())
        return 0
    given_costs = {}
    rows = record.read_rows(args.rows)
    if args.what == "validate":
        made: Iterable[record.Row] = validate(preset, rows)
    else:
        if args.costs:
            costs = Costs(**json.loads(args.costs.read_text()))
        else:
            costs = H100_4B if args.what == "project" else costs_of(rows, preset)
        given_costs = {"costs": asdict(costs)}
        made = reach(preset, costs) if args.what == "reach" else project(costs)
    common = {
        "bench": f"simulate {args.what}",
        "run_id": f"{args.what}-{record.provenance()['time']}",
        **record.provenance(),
    }
    found = False
    for row in made:
        found = True
        parts = (f"{key} {value:.3f}" if isinstance(value, float) else str(value) for key, value in row.items())
        print("  ".join(parts), flush=True)
        record.append_rows(args.out, [{**common, **given_costs, **row}])
    return int(not found)


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
