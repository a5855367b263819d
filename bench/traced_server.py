"""`python -m bench.traced_server`: the patched server, whose scheduler logs its steps and the ends of copies.

Files of JSON lines in the folder `APRIL_STEPS`: `forwards.jsonl`, one line as each forward of the model begins on rank
0 (`at`: seconds since the epoch, `decode`, `rows`), and `copies.jsonl`, one line when a copy of pages has ended; with
`APRIL_SPANS` set, also `spans.jsonl`, one line for each part of the scheduler loop (`at`, `took`: seconds; `cpu`: CPU
seconds of its thread; `thread`: CPU seconds of the thread when it began; forwards also have `rows` and `context`, the
tokens of all rows). The hooks also apply in the scheduler: it is a fork, or a spawned process, which imports this file
again. Without `--april-quota` it is a stock server, whose spans are in `stock-spans.jsonl`.
"""

import bisect
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ENV, SPANS_ENV = "APRIL_STEPS", "APRIL_SPANS"
FORWARDS, COPIES, SPANS, STOCK_SPANS = "forwards.jsonl", "copies.jsonl", "spans.jsonl", "stock-spans.jsonl"
_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
_REPORT = "sglang_april.adapter.core.rank0_broadcast.Rank0Broadcast.report"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
PIECES = {
    "forward": _FORWARD,
    "sample": "sglang.srt.model_executor.model_runner.ModelRunner.sample",
    "run": f"{_SCHEDULER}run_batch",
    "next": f"{_SCHEDULER}get_next_batch_to_run",
    "results": f"{_SCHEDULER}process_batch_result",
    "requests": f"{_SCHEDULER}process_input_requests",
}
"""Parts of the loop, one method each. `run` contains `forward` and `sample`."""


@contextlib.contextmanager
def into(folder: Path, *, spans: bool = False) -> Iterator[None]:
    """A server started in this context logs into `folder`."""
    os.environ |= {ENV: str(folder)} | ({SPANS_ENV: "1"} if spans else {})
    try:
        yield
    finally:
        del os.environ[ENV]
        os.environ.pop(SPANS_ENV, None)


class Lines:
    """Reads a growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_to, self._rest = path, 0, ""
        self._lines: list[dict[str, Any]] = []

    def read(self, since: float) -> list[dict[str, Any]]:
        """Lines with `at` of `since` or later."""
        if self._path.exists():
            with self._path.open() as file:
                file.seek(self._read_to)
                *whole, self._rest = (self._rest + file.read()).split("\n")
                self._read_to = file.tell()
            self._lines += map(json.loads, whole)
        return self._lines[bisect.bisect_left(self._lines, since, key=lambda line: line["at"]) :]


def note_forwards(folder: Path) -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def begins(stock: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            decode, rows = forward_batch.forward_mode.is_decode(), int(forward_batch.batch_size)
            _note(folder / FORWARDS, decode=bool(decode), rows=rows)
        return stock(runner, forward_batch, *args, **kwargs)

    HookRegistry.register(_FORWARD, begins, HookType.AROUND)


def note_copies(folder: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def ended(_: None, _info: Any, order: int, failure: str = "") -> None:
        _note(folder / COPIES, order=order, failure=failure)

    HookRegistry.register(_REPORT, ended, HookType.AFTER)


def note_spans(folder: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    out = (folder / (SPANS if "--april-quota" in sys.argv else STOCK_SPANS)).open("a", buffering=1)

    def timed(piece: str) -> Callable[..., Any]:
        def call(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            at, start, thread = time.time(), time.perf_counter(), time.thread_time()
            returned = stock(*args, **kwargs)
            took, cpu = time.perf_counter() - start, time.thread_time() - thread
            line = {"at": at, "took": took, "thread": thread, "cpu": cpu, "piece": piece}
            if piece == "forward":
                batch = args[1]
                decode, context = bool(batch.forward_mode.is_decode()), int(batch.seq_lens_sum)
                line |= {"rows": int(batch.batch_size), "decode": decode, "context": context}
            out.write(json.dumps(line) + "\n")
            return returned

        return call

    for piece, target in PIECES.items():
        HookRegistry.register(target, timed(piece), HookType.AROUND)


def _note(path: Path, **fields: Any) -> None:
    with path.open("a") as out:
        out.write(json.dumps({"at": time.time(), **fields}) + "\n")


if ENV in os.environ:
    note_forwards(Path(os.environ[ENV]))
    note_copies(Path(os.environ[ENV]))
    if SPANS_ENV in os.environ:
        note_spans(Path(os.environ[ENV]))

if __name__ == "__main__":
    from sglang_april.launch_server import main

    main(sys.argv[1:])
