"""Where the time of a round goes: shares of each part of the scheduler loop, in rounds and in a full batch.

    python -m bench.timeline --record
    python -m bench.timeline --preset april-paced/8 --record
    python -m bench.timeline --preset april-paced/4 --record
    python -m bench.timeline --preset april-paced/8 --variant april-continue --record
    python -m bench.timeline --preset april-paced --warm-rounds 2 --rounds 2 --record    # twenty minutes

The workload is that of a preset of `bench.rollout`. The traced server (`bench.traced_server`) logs when each part of
its scheduler loop began and how long it took. A row has the parts' shares of the rounds' time, from the start of the
push to the reply:

- `decode`, `prefill`: the model's forwards; `sample`: drawing tokens; `run`: the rest of `run_batch`;
- `results`: tokens into requests, finished samples, bookkeeping of both, sending to the detokenizer;
- `next`: choosing the next batch, by SGLang and the plugin; `requests`: control requests (rounds, pushes);
- `between`: from the last step of a round to the first of the next, without `requests`;
- `loop`: the rest of the loop, between steps.

A row also has `push_ms` and, as means over the gaps between two rounds, `idle_ms` (the device is idle, push included)
and `idle_steps` (the same without the push, in steps). The overlap loop launches a forward while the one before runs;
the last one has ended when its results are processed, less the CPU time of that. A variant whose samples stop at the
quota also has `after_ms`, from the end of the last forward to the reply, and `start_ms`, from the end of the push to
the first launch; those of `april-continue` run on until the push.

A row of the full batch alone (the limit) has the same shares; the difference is what rounds lose. A paced preset has no
such row, because its limit is that of its table, and its `results` include waiting for the forward.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import harmonic_mean, mean, median
from typing import Any

from bench import record, traced_server
from bench.loop_tables import PACED
from bench.random_checkpoint import two_policies
from bench.rollout.april import AprilContinue
from bench.rollout.engine_client import EngineClient
from bench.rollout.presets import PRESETS, Cell, Paced, Preset
from bench.rollout.runner import KINDS, Track
from bench.rollout.servers import Size, patched_server
from bench.rollout.testbed import Testbed
from examples import interrupt

Window = tuple[float, float]
"""Seconds since the epoch."""
BATCH_QUOTA = tuple(name for name in KINDS if name.startswith("april") and name != "april-factor")


def shares(spans: list[dict[str, Any]], windows: list[Window]) -> dict[str, float]:
    """Each part's share of the windows' time (they add up to 1); and of the decode forwards their number `steps`, and
    the means of `rows`, of a row's `context` in tokens and of `decode_ms`."""
    took = dict.fromkeys(("decode", "prefill", "sample", "run", "results", "next", "requests", "between", "loop"), 0.0)
    steps = rows = context = 0
    for start, end in windows:
        inside = [span for span in spans if start <= span["at"] < end]
        for span in inside:
            piece = span["piece"]
            if piece == "forward":
                piece = "decode" if span["decode"] else "prefill"
                if span["decode"]:
                    steps, rows, context = steps + 1, rows + span["rows"], context + span["context"]
            took[piece] += span["took"]
            took["run"] -= span["took"] if piece in ("decode", "prefill", "sample") else 0.0
        runs = [span for span in inside if span["piece"] == "run"]
        first, last = (runs[0]["at"], runs[-1]["at"] + runs[-1]["took"]) if runs else (end, end)
        requests = sum(
            span["took"] for span in inside if span["piece"] == "requests" and not first <= span["at"] < last
        )
        took["between"] += max(0.0, (first - start) + (end - last) - requests)
    total = sum(end - start for start, end in windows)
    took["loop"] = total - sum(took.values())
    of_steps = {"rows": rows / max(steps, 1), "context": context / max(rows, 1)}
    of_steps["decode_ms"] = 1000 * took["decode"] / max(steps, 1)
    return {"steps": steps, **of_steps, **{name: seconds / total for name, seconds in took.items()}}


def gap(
    spans: list[dict[str, Any]], windows: list[Window], pushes: list[float], *, stops: bool = True
) -> dict[str, float]:
    """`step_ms`, the median from one launch of a decode forward to the next; and means of the gaps between rounds in
    `windows`: `push_ms`, `idle_ms`, `idle_steps`, and if samples stop at the quota `after_ms` and `start_ms`.

    `pushes`: seconds of each round's push, without the first round's. Time between two windows is not part of a gap. A
    forward whose results are not among the spans counts from its launch.
    """
    steps, replies, starts = [], [], []
    for ((began, reply), (start, end)), push in zip(pairwise(windows), pushes, strict=True):
        inside = [span for span in spans if began <= span["at"] < end]
        launches = [span for span in inside if span["piece"] == "forward"]
        pairs = list(pairwise(launches))
        steps += [two["at"] - one["at"] for one, two in pairs if one["decode"] and two["decode"] and one["at"] >= start]
        # Samples that run on stop and start again within the push: the longest pause around it.
        around = [(one["at"], two["at"]) for one, two in pairs if one["at"] < start + push and two["at"] >= start]
        last, first = max(around, key=lambda pair: pair[1] - pair[0])
        processed = [span for span in inside if span["piece"] == "results" and last < span["at"] < first]
        ended = max((span["at"] + span["took"] - span["cpu"] for span in processed), default=last)
        replies.append(reply - ended)
        starts.append(first - start - push)
    step, push, after, to_launch = median(steps), mean(pushes), mean(replies), mean(starts)
    idle = after + push + to_launch
    in_ms = {"step_ms": step, "push_ms": push, "idle_ms": idle} | (
        {"start_ms": to_launch, "after_ms": after} if stops else {}
    )
    return {**{name: 1e3 * seconds for name, seconds in in_ms.items()}, "idle_steps": (idle - push) / step}


async def measure(url: str, folder: Path, preset: Preset, variant: str, checkpoints: tuple[Path, Path]) -> list[Any]:
    """Three rows: the full batch before, the variant's rounds in the steady state, the full batch after."""
    spans = traced_server.Lines(folder / traced_server.SPANS)
    began = time.time()
    async with EngineClient(url, patched=True) as engine:
        given = preset.limit("lognormal") if isinstance(preset, Paced) else None
        testbed = Testbed(engine, engine, checkpoints, preset, given_limit=given)
        track = Track(testbed, Cell("lognormal", variant))
        steady = await track.warm()
        limits, full = [], []
        for measured in (False, True, False):
            if measured:
                windows, pushes, tokens = await _rounds(track, preset.measured)
                continue
            start = time.time()
            limits.append(await testbed.limit("lognormal"))
            full.append((start, time.time()))
    seen = spans.read(began)
    gaps = gap(seen, windows, pushes, stops=variant != AprilContinue.name)
    windows = windows[1:]
    seconds = sum(end - start for start, end in windows)
    rate = tokens / seconds
    rates = {
        "variant": variant,
        "steady": steady,
        "rounds": len(windows),
        "delivered_tokens_per_s": rate,
        "share_of_limit": rate / harmonic_mean(limits),
    }
    rows = [{"what": "rounds", "seconds": seconds, **rates, **shares(seen, windows), **gaps}]
    if given is None:
        rows += [{"what": "full batch", "seconds": sum(end - start for start, end in full), **shares(seen, full)}]
    return rows


async def _rounds(track: Track, count: int) -> tuple[list[Window], list[float], int]:
    """The windows of `count` measured rounds after that of an unmeasured one; their pushes in seconds; their tokens."""
    windows, pushes, tokens = [], [], 0
    for _ in range(count + 1):
        measured = await track.round()
        windows.append((track.began, track.began + measured.seconds))
        pushes.append(measured.push_s)
        tokens += measured.round.tokens if len(windows) > 1 else 0
    await track.variant.rest()
    return windows, pushes[1:], tokens


def main(given: list[str] | None = None) -> int:
    """Measure and print or record the rows; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.timeline", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=("cpu", *PACED), default="cpu", help="preset of sizes (%(default)s)")
    parser.add_argument("--variant", choices=BATCH_QUOTA, default="april-keep", help="variant to trace (%(default)s)")
    parser.add_argument(
        "--warm-rounds", type=int, help="rounds after which measuring begins even if the carry is not steady"
    )
    parser.add_argument("--rounds", type=int, help="measured rounds")
    parser.add_argument("--record", action="store_true", help="append the rows to bench/results/timeline.json")
    args = parser.parse_args(given)
    preset = PRESETS[args.preset]
    preset = replace(preset, warm_limit=args.warm_rounds or preset.warm_limit, measured=args.rounds or preset.measured)
    with tempfile.TemporaryDirectory(prefix="april-bench-") as name, traced_server.into(Path(name), spans=True):
        folder = Path(name)
        checkpoints = two_policies(folder, preset.shape)
        pace = preset.pace.absolute() if isinstance(preset, Paced) else None
        plan, pool = preset.plan, preset.pool_tokens
        size = Size(checkpoints[0], plan.slots, preset.context, pool, (), "bench.traced_server", pace=pace)
        common = record.provenance()
        with patched_server(size, Path("out") / "bench") as url:
            rows = asyncio.run(measure(url, folder, preset, args.variant, checkpoints))
    for row in rows:
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    if args.record:
        run_id = f"timeline-{common['time']}"
        made = [{"bench": "timeline", "run_id": run_id, "preset": preset.name, **common, **row} for row in rows]
        record.append_rows(record.RESULTS / "timeline.json", made)
    return 0


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
