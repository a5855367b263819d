"""``make gpu``: all checks and benchmarks that need a GPU, in pieces. The next call skips pieces that passed.

    make gpu                                     # on a machine with a GPU (CUDA or ROCm)
    make gpu GPU_ARGS="--only resume live"       # only pieces whose names start so
    make gpu GPU_ARGS=--rehearse                 # the same pieces at their smallest, on the CPU platform

The page at the end lists what passed. Nothing is downloaded.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from bench import record
from bench.gpu.page import log_of, page
from bench.gpu.pieces import CONTINUES, GpuSetting, Piece, pieces
from examples import interrupt
from examples.april_demo.server import has_gpu

LIMIT_S = 9 * 60
END_S = 10.0


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rehearse", action="store_true", help="run the smallest form of each piece on the CPU platform"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="run only pieces whose names start with NAME"
    )
    parser.add_argument("--again", action="store_true", help="also run pieces that have passed")
    parser.add_argument("--list", action="store_true", help="print the pieces and their commands without running them")
    parser.add_argument(
        "--checkpoints", nargs=2, type=Path, metavar="DIR", help="two checkpoints with the shape of Qwen3-0.6B"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for logs, state and page (default: out/gpu or out/gpu-rehearsal)"
    )
    return parser.parse_args(given)


def setting_of(args: argparse.Namespace) -> GpuSetting:
    """Where the pieces run.

    Raises:
        SystemExit: there is no GPU, and it is no rehearsal.
    """
    folder = args.out or record.ROOT / "out" / ("gpu-rehearsal" if args.rehearse else "gpu")
    folder = folder.absolute()
    if args.rehearse:
        if has_gpu():
            raise SystemExit("--rehearse is for machines without a GPU; this one has one")
        return GpuSetting("cpu", folder, folder / "results")
    if not has_gpu():
        raise SystemExit("torch sees no GPU here; GPU_ARGS=--rehearse runs the same pieces on the CPU platform")
    import torch

    memory = round(torch.cuda.get_device_properties(0).total_memory / 1e9)
    checkpoints = (args.checkpoints[0], args.checkpoints[1]) if args.checkpoints else None
    major, _ = torch.cuda.get_device_capability(0)
    return GpuSetting("rocm" if torch.version.hip else "cuda", folder, record.RESULTS, memory, major, checkpoints)


def new_run_id(piece: Piece) -> str:
    """A run id with the commit and the time."""
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"gpu-{piece.name.replace('/', '-').replace(' ', '-')}-{record.commit()[:8]}-{started}"


def run_piece(piece: Piece, folder: Path, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run a piece to its end or to its limit; its output goes to its log."""
    log = log_of(folder, piece)
    paths = [str(record.ROOT), str(record.ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **dict(piece.environment), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    began = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            piece.command,
            cwd=record.ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    if status is None:
        state = "timed out"
    elif status:
        state = "failed"
    else:
        state = "continues" if CONTINUES in log.read_text(errors="replace") else "passed"
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"state": state, "seconds": time.monotonic() - began, "at": at, "commit": record.commit()}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, so that a piece ends its servers, which are separate process groups; then kill what is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(given: list[str] | None = None) -> int:
    """Returns 0 if every chosen piece passed, now or before."""
    args = arguments(given)
    setting = setting_of(args)
    every = pieces(setting)
    chosen = [piece for piece in every if not args.only or piece.name.startswith(tuple(args.only))]
    if not chosen:
        raise SystemExit(
            f"no piece has a name that starts with this; the pieces are {', '.join(piece.name for piece in every)}"
        )
    if args.list:
        print("\n".join(f"{piece.name}: {' '.join(piece.command)}" for piece in chosen))
        return 0
    setting.folder.mkdir(parents=True, exist_ok=True)
    where = setting.folder / "state.json"
    state: dict[str, Any] = json.loads(where.read_text()) if where.exists() else {}
    for number, piece in enumerate(chosen, 1):
        label = f"[{number}/{len(chosen)}] {piece.name}"
        if not args.again and state.get(piece.name, {}).get("state") == "passed":
            print(f"{label}: passed before", flush=True)
            continue
        print(f"{label}: log {log_of(setting.folder, piece)}", flush=True)
        run_id = state.get(piece.name, {}).get("run_id") or ""
        # Rows of another commit are not those of this one. Outside of a repository there is none, and "" is in "".
        if args.again or not run_id or record.commit()[:8] not in run_id:
            run_id = new_run_id(piece)
        # Stored before the piece begins, so that the next call continues a run that was interrupted.
        state[piece.name] = {"state": "interrupted", "seconds": 0.0, "run_id": run_id}
        where.write_text(json.dumps(state, indent=1) + "\n")
        state[piece.name] = {**run_piece(piece.of_run(run_id), setting.folder), "run_id": run_id}
        where.write_text(json.dumps(state, indent=1) + "\n")
        print(f"{label}: {state[piece.name]['state']} after {state[piece.name]['seconds']:.0f} s", flush=True)
    report = setting.folder / "page.md"
    report.write_text(page(setting, every, state))
    print(report)
    return int(any(state[piece.name]["state"] != "passed" for piece in chosen))


if __name__ == "__main__":
    interrupt.run(main, "pieces that passed are kept; the same command continues with the others")
