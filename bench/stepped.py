"""`python -m bench.stepped`: the patched server, whose scheduler writes down when it steps and when copies end.

Two files of JSON lines in the folder `APRIL_STEPS`: `forwards.jsonl`, one line as each forward of the model begins on
rank 0 (`at`: seconds since the epoch, `decode`, `rows`), and `copies.jsonl`, one line when a copy of pages has ended.
SGLang spawns its scheduler, and a spawned process imports this file again: so the hooks are applied there too.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ENV = "APRIL_STEPS"
FORWARDS, COPIES = "forwards.jsonl", "copies.jsonl"
_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
_REPORT = "sglang_april.adapter.v0_5_17.facts.Facts.report"


@contextlib.contextmanager
def into(folder: Path) -> Iterator[None]:
    """A server started in here writes there."""
    os.environ[ENV] = str(folder)
    try:
        yield
    finally:
        del os.environ[ENV]


def note_forwards(folder: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def begins(stock: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if runner.ps.tp_rank == 0:
            decode, rows = forward_batch.forward_mode.is_decode(), int(forward_batch.batch_size)
            _note(folder / FORWARDS, decode=bool(decode), rows=rows)
        return stock(runner, forward_batch, *args, **kwargs)

    HookRegistry.register(_FORWARD, begins, HookType.AROUND)


def note_copies(folder: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def ended(_: None, _facts: Any, order: int, failure: str = "") -> None:
        _note(folder / COPIES, order=order, failure=failure)

    HookRegistry.register(_REPORT, ended, HookType.AFTER)


def _note(path: Path, **fields: Any) -> None:
    with path.open("a") as out:
        out.write(json.dumps({"at": time.time(), **fields}) + "\n")


if ENV in os.environ:
    note_forwards(Path(os.environ[ENV]))
    note_copies(Path(os.environ[ENV]))

if __name__ == "__main__":
    from sglang_april.launch_server import main

    main(sys.argv[1:])
