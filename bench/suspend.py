"""The cost of ending a round with 64 running samples and of resuming them, per tier, while other requests decode.

    python -m bench.suspend --record          # on a CPU with a tiny model; on a GPU with --model

Another run decodes all the time. The measured run ends its round, and its running samples move to one tier (`tier` of
the request: device, host, disk, or none, from which they are prefilled again). New weights arrive without a flush, so
that no recompute can use the radix tree; the next round resumes the samples. Tiers take turns within a repetition.

`reply_ms`: from the quota to sending the reply, in the engine. A stall is a decode step of the other requests that
takes longer than their usual one, by the times at which the scheduler began its forwards (`bench.traced_server`).
`stall_p99_steps` is the 99th percentile of their steps from the end of the round until the last page is copied, minus
that of tier `device`, where nothing is copied, in median steps. `resume_ms`: from the request of the next round until
all samples have a new token; `resume_stall_p99_steps` likewise. One more row is SGLang's own `get_cpu_copy` of the same
slots of the same pool, which would block the scheduler thread.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import record, traced_server
from bench.rollout.engine_client import EngineClient
from bench.rollout.servers import Size, patched_server
from bench.rollout.workload import FIRST_TOKEN, VOCAB
from examples import interrupt
from examples.april_demo.server import has_gpu
from examples.tiny_model import make

TIERS = ("device", "host", "disk", "none")
AT_LEAST = 32
"""Smallest number of steps in a window, used where nothing is copied."""
NEXT_ROUND_STEPS = 12
"""Length of the next round in steps, long enough for background samples that restart in it."""
POLL_S, PATIENCE_S = 0.01, 120.0


@dataclass(frozen=True)
class SuspendPlan:
    samples: int = 64
    """Samples that are suspended and resumed."""
    beside: int = 16
    """Running samples of the background run."""
    prompt: int = 512
    """Tokens of a sample's prompt."""
    output: int = 16
    """Output tokens of a sample when its round ends."""
    length: int = 512
    """`max_new_tokens`; only samples of the background run reach it."""
    repetitions: int = 5

    @property
    def slots(self) -> int:
        """Includes a spare slot: when slots run short, SGLang counts a prompt twice that it prefills in chunks."""
        return self.samples + 1 + self.beside + 1

    @property
    def context(self) -> int:
        return self.prompt + self.length + 32

    @property
    def pool_tokens(self) -> int:
        """Twice the longest context per slot, because the radix tree keeps the prompts of the previous round."""
        return 2 * self.slots * self.context + 8192


@dataclass
class TierTimes:
    """Measurements of one tier over all repetitions."""

    reply_ms: list[float] = field(default_factory=list)
    copy_ms: list[float] = field(default_factory=list)
    resume_ms: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """Step times of the background run while pages are copied, in seconds."""
    resume_steps: list[float] = field(default_factory=list)
    suspended: int = 0
    resumed: int = 0
    tokens: int = 0
    """KV tokens that were moved off the device."""


class Steps:
    """Times of the scheduler's forwards and copies, from the log that `bench.traced_server` writes."""

    def __init__(self, folder: Path) -> None:
        self._forwards, self._copies = (
            traced_server.Lines(folder / traced_server.FORWARDS),
            traced_server.Lines(folder / traced_server.COPIES),
        )

    def decodes(self, since: float) -> list[tuple[float, int]]:
        """(time, rows) of each decode forward."""
        return [(line["at"], line["rows"]) for line in self._forwards.read(since) if line["decode"]]

    def copies(self, since: float) -> list[float]:
        """End time of each copy."""
        lines = self._copies.read(since)
        if failed := [line["failure"] for line in lines if line["failure"]]:
            raise RuntimeError(f"{len(failed)} copies failed: {failed[0]}")
        return [line["at"] for line in lines]

    async def until(self, since: float, enough: Callable[[list[tuple[float, int]]], bool]) -> list[tuple[float, int]]:
        async with asyncio.timeout(PATIENCE_S):
            while not enough(found := self.decodes(since)):
                await asyncio.sleep(POLL_S)
        return found

    async def until_copied(self, since: float, copies: int) -> float:
        """Wait for this many copies; returns the end time of the last."""
        deadline = time.monotonic() + PATIENCE_S
        while len(found := self.copies(since)) < copies:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(found)} of {copies} copies have ended after {PATIENCE_S:.0f} s")
            await asyncio.sleep(POLL_S)
        return max(found, default=since)


def prompt(name: str, tokens: int, length: int, salt: int) -> dict[str, Any]:
    """A prompt for one sample that shares no prefix with others."""
    ids = [FIRST_TOKEN + (salt * 7919 + 31 * at + at * at) % (VOCAB - FIRST_TOKEN) for at in range(tokens)]
    params = {"ignore_eos": True, "temperature": 1.0, "max_new_tokens": length}
    return {"id": name, "input_ids": ids, "sampling_params": params}


@contextlib.asynccontextmanager
async def background_run(engine: EngineClient, plan: SuspendPlan, steps: Steps) -> AsyncIterator[None]:
    """A round that keeps `beside` samples running."""
    run, start = f"background-{uuid.uuid4().hex[:8]}", time.time()
    prompts = [prompt(str(i), 16, plan.length, 10_000 + i) for i in range(64 * plan.beside)]
    body = {"run": run, "round_id": run, "prompts": prompts, "quota": None, "concurrency": plan.beside}
    reply = asyncio.ensure_future(engine.rollout(body))
    try:
        await steps.until(start, lambda found: len(found) > 3 or reply.done())
        yield
        if reply.done():
            raise RuntimeError("the background run ended: increase --length")
    finally:
        with contextlib.suppress(Exception):
            await engine.post(f"/april/rounds/{run}/stop", {})
        await asyncio.wait([reply])
        await engine.post("/april/drop", {"run": run})


async def once(
    engine: EngineClient, plan: SuspendPlan, steps: Steps, tier: str, salt: int, weights: Path, seen: TierTimes
) -> None:
    """One repetition: round, push without a flush, round; drops the run at the end."""
    run = f"suspend-{uuid.uuid4().hex[:8]}"
    mine = [prompt(str(i), plan.prompt, plan.length, salt * 1000 + i) for i in range(plan.samples)]
    end = prompt("end", 16, plan.output, salt * 1000 + 999)
    first = await engine.rollout({"run": run, "prompts": [end, *mine], "quota": 1, "kv": "keep", "tier": tier})
    met = first.stats["t_quota_met"]
    copied = await steps.until_copied(met, plan.samples if tier in ("host", "disk") else 0)
    found = await steps.until(met, lambda found: len(found) > AT_LEAST and found[-1][0] > copied)
    window = max(AT_LEAST, sum(at <= copied for at, _ in found) + 1)
    seen.steps += np.diff([at for at, _ in found[: window + 1]]).tolist()
    seen.reply_ms.append(1e3 * first.stats["quota_to_reply_s"])
    seen.copy_ms.append(1e3 * (copied - met))
    seen.suspended += first.carried["samples"]
    seen.tokens += sum(n for name, n in first.carried["tokens_by_tier"].items() if name != "none")

    await engine.post("/april/push/begin", {})
    await engine.load_weights(weights, flush=False)
    await engine.post("/april/push/end", {})
    pushed = time.time()
    await steps.until(pushed, lambda found: len(found) > 3)

    sent = time.time()
    again = prompt("again", 16, NEXT_ROUND_STEPS, salt * 1000 + 998)
    second = await engine.rollout({"run": run, "prompts": [again], "quota": 1, "kv": "keep", "tier": "device"})
    found = steps.decodes(sent)
    joined = next(i for i, (_, rows) in enumerate(found) if rows >= plan.samples + plan.beside)
    seen.resume_ms.append(1e3 * (found[joined + 1][0] - sent))
    last = steps.decodes(pushed)
    before = [at for at, _ in last if at < sent][-1:]
    seen.resume_steps += np.diff([*before, *(at for at, _ in found[: joined + 1])]).tolist()
    seen.resumed += second.stats["resumed_kept"] + second.stats["resumed_recomputed"]
    await engine.post("/april/drop", {"run": run})


async def measure(url: str, folder: Path, plan: SuspendPlan, weights: Path, on_gpu: bool) -> list[record.Row]:
    """One row per tier, and one for SGLang's own copy."""
    steps, seen = Steps(folder), {tier: TierTimes() for tier in TIERS}
    async with EngineClient(url, patched=True) as engine, background_run(engine, plan, steps):
        await once(engine, plan, steps, "host", 0, weights, TierTimes())  # warms up the host arena, caches and code
        for number in range(plan.repetitions):
            for at, tier in enumerate(TIERS):
                await once(engine, plan, steps, tier, 1 + number * len(TIERS) + at, weights, seen[tier])
    rows = [{"tier": tier, **tier_metrics(one, seen["device"], plan)} for tier, one in seen.items()]
    config = json.loads((weights / "config.json").read_text())
    return [*rows, sglang_copy(config, plan, on_gpu, median(seen["device"].steps))]


def tier_metrics(one: TierTimes, device: TierTimes, plan: SuspendPlan) -> record.Row:
    usual = median(device.steps)
    calm, calm_resume = (float(np.percentile(of, 99)) for of in (device.steps, device.resume_steps))
    return {
        "samples": plan.samples,
        "kv_tokens": one.tokens // plan.repetitions,
        "suspended": one.suspended,
        "resumed": one.resumed,
        "step_ms_median": 1e3 * usual,
        "reply_ms_p50": median(one.reply_ms),
        "reply_ms_p99": float(np.percentile(one.reply_ms, 99)),
        "copy_ms_p50": median(one.copy_ms),
        "steps_seen": len(one.steps),
        "step_ms_p99": 1e3 * float(np.percentile(one.steps, 99)),
        "stall_p99_steps": (float(np.percentile(one.steps, 99)) - calm) / usual,
        "resume_ms_p50": median(one.resume_ms),
        "resume_ms_p99": float(np.percentile(one.resume_ms, 99)),
        "resume_stall_p99_steps": (float(np.percentile(one.resume_steps, 99)) - calm_resume) / usual,
    }


def sglang_copy(config: dict[str, Any], plan: SuspendPlan, on_gpu: bool, step_s: float) -> record.Row:
    """`get_cpu_copy` and `load_cpu_copy` of each sample's slots, one after the other, in this process."""
    from bench.kernel_cases import KernelConfig, KernelTestbed

    heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dtype, device = (config["torch_dtype"], "cuda") if on_gpu else ("float32", "cpu")
    tokens = plan.prompt + plan.output
    testbed = KernelTestbed(
        KernelConfig(config["num_hidden_layers"], heads, dim, dtype, 16), plan.samples * tokens, device
    )
    if testbed.sglang is None:
        return {"tier": "sglang get_cpu_copy", "skipped": testbed.why_not}
    copy_ms, load_ms = [], []
    for _ in range(plan.repetitions + 1):
        start = time.perf_counter()
        slots = testbed.random.split(tokens)
        copies = [testbed.sglang.get_cpu_copy(mine) for mine in slots]
        half = time.perf_counter()
        for mine, copy in zip(slots, copies, strict=True):
            testbed.sglang.load_cpu_copy(copy, mine)
        copy_ms.append(1e3 * (half - start))
        load_ms.append(1e3 * (time.perf_counter() - half))
    copied, loaded = median(copy_ms[1:]), median(load_ms[1:])
    return {
        "tier": "sglang get_cpu_copy",
        "samples": plan.samples,
        "kv_tokens": plan.samples * tokens,
        "copy_ms_p50": copied,
        "stall_p99_steps": copied / 1e3 / step_s,
        "resume_ms_p50": loaded,
        "resume_stall_p99_steps": loaded / 1e3 / step_s,
    }


def parsed(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.suspend", description=(__doc__ or "").partition("\n")[0])
    for name, default in asdict(SuspendPlan()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="%(default)s")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: the tiny model)")
    parser.add_argument("--server-options", default="", help="further flags of the server, in one string")
    parser.add_argument("--record", action="store_true", help="append the rows to bench/results/suspend.json")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Print one line per tier; returns the exit status."""
    args = parsed(given)
    plan = SuspendPlan(**{name: getattr(args, name) for name in asdict(SuspendPlan())})
    common = {"bench": "suspend", "run_id": uuid.uuid4().hex[:12], **record.provenance(), "config": asdict(plan)}
    with tempfile.TemporaryDirectory(prefix="april-bench-") as name:
        folder = Path(name)
        model = args.model or make(folder / "model", dtype="float32")
        (folder / "disk").mkdir()
        disk = (f"--april-disk-dir={folder / 'disk'}", "--april-disk-gb=100", "--chunked-prefill-size=2048")
        flags = (*disk, *args.server_options.split())
        size = Size(model, plan.slots, plan.context, plan.pool_tokens, flags, "bench.traced_server")
        with traced_server.into(folder), patched_server(size, record.ROOT / "out" / "bench") as url:
            rows = asyncio.run(measure(url, folder, plan, model, has_gpu()))
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if args.record:
        record.append_rows(record.RESULTS / "suspend.json", [{**common, **row} for row in rows])
    return 0


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
