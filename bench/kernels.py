"""Times the page kernels and compares them with torch, SGLang, flashinfer and the limits of the machine.

    python -m bench.kernels                      # Qwen3-4B's KV on a GPU (CUDA or ROCm); small sizes without one
    python -m bench.kernels --plot out           # also draws the run

Rates are relative to copy peaks measured in the same run. Rows are appended to a JSON list as they are measured; each
has everything needed to repeat it. A case that cannot run here is a row with the reason.
"""

import argparse
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__" and not __package__:
    # As a script this folder would be on the path, and this file would hide Hugging Face's `kernels` from SGLang.
    sys.exit("run it as: python -m bench.kernels")

import torch

from bench import record
from bench.kernel_cases import KernelCase, KernelConfig, KernelTestbed, Missing, cases
from examples import interrupt

DTYPES = ("bfloat16", "float16", "float32")
CPU_REPEATS = 7
CPU_AT_LEAST_S = 0.02
"""Shortest duration of one measurement; shorter calls are repeated within it."""

FAILED = "failed:"
"""Begins the reason of a case that should run here."""

T = TypeVar("T")
Times = tuple[float, float, float]
"""Milliseconds of one call: 20th, 50th and 80th percentile."""


def timed(found: Iterable[KernelCase | Missing], device: str) -> list[tuple[KernelCase, Times] | Missing]:
    """Each case with its times, or why it has none: a case that fails costs its own row alone.

    On a GPU a case is timed before the next one begins, because a fault of the device may end all that follow. On a CPU
    the cases alternate, so that background load affects all of them alike.
    """
    if device != "cpu":
        return [_tried(case, partial(_gpu_times, device)) for case in _with_error(found)]
    tried = [_tried(case, _cpu_calls) for case in _with_error(found)]
    counts = [one for one in tried if not isinstance(one, Missing)]
    took: list[list[float]] = [[] for _ in counts]
    for _ in range(CPU_REPEATS):
        for (case, count), mine in zip(counts, took, strict=True):
            mine.append(1e3 * _seconds(case.run, count) / count)
    for mine in took:
        mine.sort()
    times = iter((mine[CPU_REPEATS // 5], mine[CPU_REPEATS // 2], mine[-1 - CPU_REPEATS // 5]) for mine in took)
    return [one if isinstance(one, Missing) else (one[0], next(times)) for one in tried]


def _with_error(found: Iterable[KernelCase | Missing]) -> Iterator[KernelCase | Missing]:
    """The cases; what fails between two of them, as after a fault of the device, is the last one."""
    try:
        yield from found
    except Exception as error:  # noqa: BLE001 - see _tried
        yield _failed("all further cases", error)


def _tried(case: KernelCase | Missing, call: Callable[[KernelCase], T]) -> tuple[KernelCase, T] | Missing:
    """The case with what `call` returns for it, or the reason why it failed."""
    if isinstance(case, Missing):
        return case
    try:
        return case, call(case)
    except Exception as error:  # noqa: BLE001 - whatever a kernel or its compiler raises
        return _failed(case.name, error)


def _failed(name: str, error: Exception) -> Missing:
    return Missing(name, f"{FAILED} {type(error).__name__}: {error}"[:500])


def _gpu_times(device: str, case: KernelCase) -> Times:
    from triton.testing import do_bench

    case.run()
    synchronize(device)
    # `do_bench` empties the L2 cache before every call.
    p20, p50, p80 = do_bench(case.run, warmup=25, rep=200, quantiles=[0.2, 0.5, 0.8])
    synchronize(device)
    return p20, p50, p80


def synchronize(device: str) -> None:
    """Wait for the device, so that the error of a kernel is raised here and not in a later case; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def _cpu_calls(case: KernelCase) -> int:
    """Calls in one measurement of the case."""
    case.run()
    return max(1, math.ceil(CPU_AT_LEAST_S / _seconds(case.run, 1)))


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


def measured(config: KernelConfig, tokens: int, device: str) -> list[dict[str, Any]]:
    """One row per case, with its share of the peak."""
    testbed = KernelTestbed(config, tokens, device)
    rows: list[dict[str, Any]] = []
    for one in timed(cases(testbed), device):
        if isinstance(one, Missing):
            rows.append({"name": one.name, "tokens": tokens, "skipped": one.why})
            continue
        case, (p20, p50, p80) = one
        moved = case.passes * (case.kv_bytes or testbed.kv_bytes)
        rate = {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "gb_per_s": moved / p50 / 1e6}
        row = {"name": case.name, "tokens": tokens, "programs": case.programs, "bytes_moved": moved, **rate}
        rows.append({**row, "peak": case.peak})
    rates = {row["name"]: row["gb_per_s"] for row in rows if "gb_per_s" in row}
    for row in rows:
        if row.get("peak") in rates:
            row["share_of_peak"] = row["gb_per_s"] / rates[row["peak"]]
    return rows


def run_fields(config: KernelConfig, device: str) -> dict[str, Any]:
    """Fields that all rows of a run share."""
    common = record.provenance()
    common["machine"]["threads"] = torch.get_num_threads()
    common["machine"]["gpu"] = torch.cuda.get_device_name() if device != "cpu" else None
    common["versions"] |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {"bench": "kernels", "run_id": uuid.uuid4().hex[:12], **common, "config": asdict(config)}


def line(row: dict[str, Any]) -> str:
    name = row["name"] + (f" ({row['programs']})" if row.get("programs") else "")
    if "skipped" in row:
        return f"{row['tokens']:>7} {name:<48} not run: {row['skipped']}"
    share = f"{row['share_of_peak']:.2f} of {row['peak']}" if "share_of_peak" in row else ""
    times = f"{row['ms_p50']:9.3f} ms [{row['ms_p20']:.3f}, {row['ms_p80']:.3f}]"
    return (
        f"{row['tokens']:>7} {name:<48} {row['bytes_moved'] / 1e6:9.1f} MB {times} {row['gb_per_s']:8.2f} GB/s {share}"
    )


def plot(rows: list[dict[str, Any]], folder: Path, title: str) -> None:
    """GB/s over tokens with the peak dashed; over the link, GB/s over programs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    done = [row for row in rows if "gb_per_s" in row]
    by_peak = {
        peak: [r for r in done if peak in (r["peak"], r["name"])] for peak in ("copy peak", "d2h peak", "h2d peak")
    }
    for peak, group in by_peak.items():
        if not group:
            continue
        figure, axis = plt.subplots(figsize=(8, 5))
        for name, programs in dict.fromkeys((row["name"], row["programs"]) for row in group):
            points = [(r["tokens"], r["gb_per_s"]) for r in group if (r["name"], r["programs"]) == (name, programs)]
            label = name + (f" ({programs})" if programs else "")
            axis.plot(*zip(*points, strict=True), "k--" if name == peak else "o-", label=label)
        axis.set(xscale="log", xlabel="tokens", ylabel="GB/s", title=title)
        axis.legend(fontsize=7)
        figure.savefig(folder / f"kernels-{peak.split()[0]}.png", dpi=150, bbox_inches="tight")
        plt.close(figure)
    link = [r for r in by_peak["d2h peak"] if r["programs"] and r["tokens"] == max(row["tokens"] for row in done)]
    if link:
        figure, axis = plt.subplots(figsize=(8, 5))
        for name in dict.fromkeys(row["name"] for row in link):
            axis.plot(
                *zip(*[(r["programs"], r["gb_per_s"]) for r in link if r["name"] == name], strict=True),
                "o-",
                label=name,
            )
        (limit,) = {
            r["gb_per_s"] for r in by_peak["d2h peak"] if r["name"] == "d2h peak" and r["tokens"] == link[0]["tokens"]
        }
        axis.axhline(limit, color="black", linestyle="--", label="d2h peak")
        axis.set(xscale="log", xlabel="programs (blocks)", ylabel="GB/s", title=title)
        axis.legend(fontsize=7)
        figure.savefig(folder / "kernels-programs.png", dpi=150, bbox_inches="tight")
        plt.close(figure)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="device of the pool; cuda also names ROCm devices",
    )
    parser.add_argument("--layers", type=int, default=36 if on_gpu else 8, help="layers of the KV pool (%(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="KV heads (%(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="head dimension (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="data type of the KV pool (%(default)s)")
    parser.add_argument("--page-tokens", type=int, default=16, help="tokens per stored page (%(default)s)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[256, 1024, 4096, 16384, 65536] if on_gpu else [256, 1024, 4096],
        help="tokens of a sample (%(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=record.RESULTS / "kernels.json",
        help="file to which rows are appended (%(default)s)",
    )
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="folder for plots of this run")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("No GPU is used: these rows time the CPU reference, not the kernels.")
    config = KernelConfig(options.layers, options.heads, options.dim, options.dtype, options.page_tokens)
    common, rows = run_fields(config, device), []
    for tokens in options.tokens:
        new_rows = [{**common, **row} for row in measured(config, tokens, device)]
        record.append_rows(options.out, new_rows)
        for row in new_rows:
            print(line(row), flush=True)
        rows += new_rows
    if options.plot:
        plot(
            rows, options.plot, f"{common['machine']['gpu'] or common['machine']['cpu']}, pages of {config.page_tokens}"
        )
    if failed := [row["name"] for row in rows if row.get("skipped", "").startswith(FAILED)]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    interrupt.run(main, "rows of finished sizes are kept")
