"""Checks on any server that resumed samples equal uninterrupted ones, for each tier.

    python -m bench.resume                                     # on a CPU with a tiny model
    python -m bench.resume --model DIR --server-options "--attention-backend fa3"

The same prompts with the same seeds are drawn twice: in one round, and suspended by a quota after a few tokens and
resumed. Kernels round differently at other batch sizes (tests/integration/test_resume.py uses equal ones, where results
are bit-identical), so samples may diverge at near ties. The check fails with exit status 1 if the first token after the
resume differs for more than one sample in ten, or if logprobs of equal tokens differ by more than the tolerance.
"""

import argparse
import asyncio
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.rollout.engine_client import EngineClient
from bench.rollout.servers import Size, patched_server
from bench.suspend import TIERS, prompt
from examples import interrupt
from examples.april_demo.server import has_gpu
from examples.tiny_model import make
from sglang_april.client.types import RolloutReply, RolloutSample

CUT = 12
"""Output tokens at which the quota suspends the samples."""
FIRST_SAME = 0.9
TOLERANCE = {"cpu": 1e-5, "gpu": 0.1}
"""Largest difference of logprobs: float32 rounds in the seventh digit, bf16 by a few hundredths."""


async def draw(engine: EngineClient, prompts: list[dict[str, Any]], **body: Any) -> RolloutReply:
    """A round until its quota, or until all samples have finished."""
    return await engine.rollout({"prompts": prompts, "quota": None, "kv": "keep", **body})


async def compared(
    engine: EngineClient, tier: str, plain: dict[str, RolloutSample], prompts: list[dict[str, Any]]
) -> record.Row:
    """One row: samples that were suspended and resumed from this tier, against uninterrupted ones."""
    run = f"resume-{uuid.uuid4().hex[:8]}"
    end = prompt("end", 16, CUT, 999_983)
    cut = await draw(engine, [*prompts, end], run=run, quota=1, tier=tier)
    partials = (await engine.get(f"/april/partials?run={run}"))["partials"]
    seams = {one["id"]: one["spans"][-1][1] for one in partials}
    rest = await draw(engine, [], run=run)
    resumed = {group.id: group.samples[0] for group in rest.finished}
    gaps = [(seam, *difference(plain[name], resumed[name])) for name, seam in seams.items()]
    return {
        "tier": tier,
        "suspended": cut.carried["samples"],
        "resumed_kept": rest.stats["resumed_kept"],
        "resumed_recomputed": rest.stats["resumed_recomputed"],
        "samples_equal": sum(at is None for _, at, _ in gaps),
        "first_token_equal": float(np.mean([at is None or at > seam for seam, at, _ in gaps])) if gaps else 0.0,
        "logprob_gap": max((gap for _, _, gap in gaps), default=float("nan")),
    }


def difference(plain: RolloutSample, resumed: RolloutSample) -> tuple[int | None, float]:
    """The index of the first differing token (or None), and the largest difference of logprobs before it."""
    same = np.asarray(plain.output_ids) == np.asarray(resumed.output_ids)
    at = None if same.all() else int(np.argmin(same))
    gaps = np.abs(np.asarray(plain.logprobs)[:at] - np.asarray(resumed.logprobs)[:at])
    return at, float(gaps.max(initial=0.0))


async def measure(url: str, samples: int, tokens: int, length: int) -> list[record.Row]:
    """One row per tier."""
    prompts = [prompt(str(i), tokens, length, i) for i in range(samples)]
    for number, one in enumerate(prompts):
        one["sampling_params"]["sampling_seed"] = number
    async with EngineClient(url, patched=True) as engine:
        reply = await draw(engine, prompts, run=f"plain-{uuid.uuid4().hex[:8]}")
        plain = {group.id: group.samples[0] for group in reply.finished}
        return [await compared(engine, tier, plain, prompts) for tier in TIERS]


def passed(row: record.Row, tolerance: float) -> bool:
    """Whether the tier was used and its samples are within the tolerance."""
    used = row["suspended"] > 0 and row["resumed_kept" if row["tier"] != "none" else "resumed_recomputed"] > 0
    return bool(used and row["first_token_equal"] >= FIRST_SAME and row["logprob_gap"] <= tolerance)


def main(given: list[str] | None = None) -> int:
    """Returns 0, or 1 if a tier changes samples."""
    parser = argparse.ArgumentParser(prog="python -m bench.resume", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=16, help="samples to resume in each tier (%(default)s)")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a response (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, help="allowed difference of logprobs (default: 1e-5 on a CPU, 0.1 on a GPU)"
    )
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: the tiny model)")
    parser.add_argument("--server-options", default="", help="further flags of the server, in one string")
    parser.add_argument(
        "--record", nargs="?", type=Path, const=record.RESULTS / "resume.json", metavar="FILE",
        help="append the rows to this file (without a value: bench/results/resume.json)",
    )  # fmt: skip
    args = parser.parse_args(given)
    tolerance = args.tolerance if args.tolerance is not None else TOLERANCE["gpu" if has_gpu() else "cpu"]
    common = {
        "bench": "resume",
        "run_id": uuid.uuid4().hex[:12],
        **record.provenance(),
        "options": args.server_options,
    }
    with tempfile.TemporaryDirectory(prefix="april-bench-") as name:
        folder = Path(name)
        model = args.model or make(folder / "model", dtype="float32")
        (folder / "disk").mkdir()
        flags = (f"--april-disk-dir={folder / 'disk'}", "--april-disk-gb=10", *args.server_options.split())
        context = args.prompt + args.length + 32
        size = Size(model, args.samples + 2, context, 2 * (args.samples + 2) * context, flags)
        with patched_server(size, record.ROOT / "out" / "bench") as url:
            rows = asyncio.run(measure(url, args.samples, args.prompt, args.length))
    for row in rows:
        row["passed"] = passed(row, tolerance)
        parts = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(parts))
    if args.record:
        record.append_rows(args.record, [{**common, **row} for row in rows])
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
