"""Tables of step times for `--april-cpu-pace`: modelled, or measured on a GPU.

    python -m bench.pace model                              # bench/pace_tables/*.json: six modelled tables
    python -m bench.pace measure --model A --out FILE       # on a GPU, not run yet; without --model: the tiny model

The model. A decode step reads the weights that it uses and the KV of all rows, and multiplies rows with weights:

    overhead + max(weight bytes / bandwidth, 2 · parameters of a token · rows / FLOPs) + KV bytes / bandwidth

A mixture of experts reads the experts that at least one row uses, with uniform routing E · (1 − (1 − k/E)^rows). A
prefill is the same over its tokens, plus 4 · layers · query width · tokens · attended FLOPs of attention and one read
of as much KV. `attended` is the mean context that a new token attends to: prefix + length / 2 in one sequence; a batch
has the mean of its sequences, weighted by length.

Bandwidths and FLOPs are peaks from data sheets times an efficiency, which is assumed, as is the overhead of 20 µs per
layer (small kernels between the large ones, in a captured graph). No published table of step times over batch and
context was found for these pairs, so every cell is modelled.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.pace_tables import TABLES
from bench.rollout.engine_client import EngineClient
from bench.rollout.limit import NeverFullError, decode_rate
from bench.rollout.servers import Size, stock_server
from bench.step_costs import prefill_seconds
from examples import interrupt
from examples.tiny_model import make

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
ATTENDED = (0, 1024, 4096, 16384, 32768)
LAYER_S = 20e-6


@dataclass(frozen=True)
class Gpu:
    """Peaks from the data sheet (dense bf16), and the assumed shares of them that kernels reach."""

    name: str
    bandwidth: float
    flops: float
    memory_gb: float
    bandwidth_share: float
    flops_share: float
    source: str


@dataclass(frozen=True)
class Model:
    """Sizes from the model's `config.json`, in bf16."""

    name: str
    layers: int
    kv_heads: int
    query_width: int
    """Query heads × their size."""
    dense: float
    """Parameters that every token uses."""
    experts: int = 0
    active: int = 0
    expert: float = 0.0
    """Parameters of one expert over all layers."""

    @property
    def kv_bytes(self) -> int:
        """KV bytes of a token."""
        return 2 * 2 * self.layers * self.kv_heads * 128

    @property
    def token_parameters(self) -> float:
        """Parameters that one token uses."""
        return self.dense + self.active * self.expert

    def read_bytes(self, tokens: float) -> float:
        """Bytes of the weights that this many tokens use, with uniform routing."""
        if not self.experts:
            return 2 * self.dense
        used = self.experts * (1 - (1 - self.active / self.experts) ** tokens)
        return 2 * (self.dense + used * self.expert)


GPUS = {
    "h100": Gpu("H100 SXM", 3.35e12, 989e12, 80, 0.80, 0.60, "NVIDIA H100 Tensor Core GPU data sheet, SXM"),
    "mi300x": Gpu("MI300X", 5.3e12, 1307e12, 192, 0.75, 0.45, "AMD Instinct MI300X data sheet"),
}
MODELS = {
    "qwen3-4b": Model("Qwen3-4B", 36, 8, 4096, 4.02e9),
    "qwen3-30b-a3b": Model("Qwen3-30B-A3B", 48, 4, 4096, 1.23e9, 128, 8, 48 * 3 * 2048 * 768),
    "qwen3-32b": Model("Qwen3-32B", 64, 8, 8192, 31.98e9),
}
"""The input embeddings of the last two (0.31e9 and 0.78e9) are left out: they are looked up, not multiplied."""


def decode_ms(model: Model, gpu: Gpu, rows: float, context: float) -> float:
    """Milliseconds of a modelled decode step."""
    bandwidth, flops = gpu.bandwidth * gpu.bandwidth_share, gpu.flops * gpu.flops_share
    weights = max(model.read_bytes(rows) / bandwidth, 2 * model.token_parameters * rows / flops)
    return 1e3 * (LAYER_S * model.layers + weights + rows * context * model.kv_bytes / bandwidth)


def prefill_ms(model: Model, gpu: Gpu, tokens: float, attended: float) -> float:
    """Milliseconds of a modelled prefill of `tokens` tokens in total, which attend to this many on average."""
    bandwidth, flops = gpu.bandwidth * gpu.bandwidth_share, gpu.flops * gpu.flops_share
    weights = max(model.read_bytes(tokens) / bandwidth, 2 * model.token_parameters * tokens / flops)
    attention = 4 * model.layers * model.query_width * tokens * attended / flops
    return 1e3 * (LAYER_S * model.layers + weights + attention + attended * model.kv_bytes / bandwidth)


def modelled(model: Model, gpu: Gpu) -> dict[str, Any]:
    """A modelled table, as written to JSON."""
    return {
        "name": f"{model.name} on one {gpu.name}, modelled",
        "kind": "modelled",
        "method": "bench/pace.py: every cell is computed by its bandwidth-and-FLOPs model; none is measured",
        "source": f"{gpu.source}: {gpu.bandwidth / 1e12:g} TB/s, {gpu.flops / 1e12:g} TFLOPS dense bf16; sizes from "
        f"{model.name}'s config.json",
        "assumed": f"{gpu.bandwidth_share:.0%} of the bandwidth, {gpu.flops_share:.0%} of the FLOPs, "
        f"{LAYER_S * 1e6:.0f} µs per layer",
        "kv_tokens_that_fit": kv_tokens(model, gpu),
        "decode_ms": _grid(ROWS, CONTEXTS, "rows", "context", lambda x, y: decode_ms(model, gpu, x, y)),
        "prefill_ms": _grid(TOKENS, ATTENDED, "tokens", "attended", lambda x, y: prefill_ms(model, gpu, x, y)),
    }


def kv_tokens(model: Model, gpu: Gpu) -> int:
    """KV tokens that fit with the weights into 0.88 of the memory, SGLang's usual static share."""
    weights = 2 * (model.dense + model.experts * model.expert)
    return int((0.88 * gpu.memory_gb * 1e9 - weights) / model.kv_bytes)


def _grid(first: Any, second: Any, one: str, other: str, ms: Any) -> dict[str, Any]:
    return {one: first, other: second, "ms": [[round(ms(x, y), 4) for y in second] for x in first]}


async def measured(url: str, rows: tuple[int, ...], contexts: tuple[int, ...], name: str) -> dict[str, Any]:
    """A table measured at the server `url`: decode steps by batch and prompt length, prefills by length.

    Each decode cell runs a full batch for 96 tokens; those whose batch does not fit are extrapolated. Each prefill
    cell is one prompt, less a one-token prefill's share of HTTP. Its tokens attend to half its length; no other context
    is measured, so both columns are equal.
    """
    async with EngineClient(url, patched=False) as engine:
        decode, extrapolated = [], []
        for batch in rows:
            line: list[float | None] = []
            for context in contexts:
                try:
                    halves = (await decode_rate(engine, batch, 96, max(1, context))).halves
                    line.append(1e3 * sum(half.seconds for half in halves) / len(halves))
                except NeverFullError:
                    line.append(None)
                    extrapolated.append((batch, context))
            decode.append(whole(batch, contexts, line))
        base = await prefill_seconds(engine, 1)
        step = decode[0][0] / 1e3
        tokens = tuple(count for count in TOKENS if count <= contexts[-1])
        took = [max(step, await prefill_seconds(engine, count) - base + step) for count in tokens]
    return {
        "name": name,
        "kind": "measured",
        "method": "bench.pace measure: decode steps from the scheduler's counters; prefills of one prompt over HTTP",
        **record.provenance(),
        "decode_ms": {"rows": rows, "context": contexts, "ms": decode, "extrapolated": extrapolated},
        "prefill_ms": {"tokens": tokens, "attended": (0, contexts[-1]), "ms": [[1e3 * one] * 2 for one in took]},
    }


def whole(batch: int, contexts: Sequence[int], measured: Sequence[float | None]) -> list[float]:
    """Times by context, those that were not measured (None) by the line through the two nearest measured ones.

    Raises:
        NeverFullError: fewer than two were measured.
    """
    known = [(context, ms) for context, ms in zip(contexts, measured, strict=True) if ms is not None]
    if len(known) < 2:
        what = f"a batch of {batch} ran with {len(known)} of the contexts {', '.join(map(str, contexts))}"
        raise NeverFullError(f"{what}, and two are needed: choose fewer --rows or smaller --contexts")
    found = []
    for context, ms in zip(contexts, measured, strict=True):
        (at, near), (at_other, other) = sorted(known, key=lambda one: abs(one[0] - context))[:2]
        found.append(near + (context - at) * (other - near) / (at_other - at) if ms is None else ms)
    return found


def main(given: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.pace", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("model", help="write the modelled tables")
    measure = commands.add_parser("measure", help="measure a table on this machine")
    measure.add_argument("--model", type=Path, help="folder of the checkpoint (default: the tiny model)")
    measure.add_argument("--out", type=Path, required=True, help="file for the table")
    measure.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256], help="batch sizes (%(default)s)"
    )
    measure.add_argument(
        "--contexts", type=int, nargs="+", default=[16, 1024, 4096], help="context lengths in tokens (%(default)s)"
    )
    args = parser.parse_args(given)
    if args.command == "model":
        for model_name, model in MODELS.items():
            for gpu_name, gpu in GPUS.items():
                path = TABLES / f"{model_name}-{gpu_name}.json"
                path.write_text(json.dumps(modelled(model, gpu), indent=1) + "\n")
                print(path)
        return 0
    rows, contexts = tuple(sorted(args.rows)), tuple(sorted(args.contexts))
    if len(rows) < 2 or len(contexts) < 2:
        print("--rows and --contexts need two values each", file=sys.stderr)
        return 2
    pool = rows[-1] * contexts[-1] // 4 + 20_000
    with tempfile.TemporaryDirectory(prefix="april-bench-") as folder:
        checkpoint = args.model or make(Path(folder) / "tiny", dtype="float32")
        size = Size(checkpoint, rows[-1], contexts[-1] + 128, pool, ("--disable-radix-cache",))
        with stock_server(size, record.ROOT / "out" / "bench") as url:
            name = f"{checkpoint.name} on one {record.gpu_name() or record.cpu_name()}, measured"
            try:
                table = asyncio.run(measured(url, rows, contexts, name))
            except NeverFullError as problem:
                print(problem, file=sys.stderr)
                return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n")
    print(args.out)
    return 0


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
