"""`python -m tests.support.launch`: the patched server with instruments that only tests have.

Hooks registered at module level also apply in the scheduler, together with the plugin's own: it is a fork, or a spawned
process, which imports this file again. The instruments: a wrapper around the model's forward that writes one line
per call and can slow it down; the relay of tokens as late as on a GPU (delayed_relay.py); detection of host stalls
(sync_detector.py); forced rates for `kv: auto`; overwriting of pages that a flush freed; blocked grammar compilation;
grammars over the whole vocabulary on every release; faults of one rank (faults.py); and guards that can be removed
while the server runs (`Server.remove_guard`), to prove that their tests can fail. Each switch is a file in the server's
folder (tests/support/server.py).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Where Megatron is installed, SGLang's dumper imports it in every process of a server: seconds of each start.
sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]

import torch  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402

from bench.traced_server import note_copies  # noqa: E402
from examples.tiny_model import VOCAB_SIZE  # noqa: E402
from sglang_april.api import messages  # noqa: E402
from sglang_april.launch_server import main  # noqa: E402
from tests.support.sync_detector import SyncDetector  # noqa: E402

FOLDER = Path(os.environ["APRIL_TEST_FOLDER"])


def count_forward(stock: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """One line per forward of the model on rank 0: whether it decodes, how many rows it has, and how many tokens."""
    if not rank():
        line = {
            "at": time.time(),
            "decode": bool(forward_batch.forward_mode.is_decode()),
            "rows": int(forward_batch.batch_size),
            "tokens": int(forward_batch.input_ids.numel()),
        }
        with (FOLDER / "forwards.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
        force_rates(switch("rates"))
    if slowed := switch("slow"):
        time.sleep(float(slowed))
    return stock(runner, forward_batch, *args, **kwargs)


def rank() -> int:
    """The tensor-parallel rank of this process; 0 until it has a scheduler."""
    from sglang_april.adapter.core.hooks_scheduler import Process
    from sglang_april.adapter.shapes.installed import shape

    return shape.tp_rank(Process.scheduler) if Process.scheduler is not None else 0


def note_sleep(stock: Callable[..., Any], sleeper: Any) -> None:
    """One line as the idle loop goes to sleep, until a message arrives or a second has passed."""
    with (FOLDER / "sleeps.jsonl").open("a") as out:
        out.write(json.dumps({"at": time.time()}) + "\n")
    stock(sleeper)


def force_rates(text: str) -> None:
    """What the switch `rates` holds is broadcast instead of what was measured at start; empty: that again."""
    from sglang_april.adapter.core.hooks_scheduler import Process

    if text == Forced.text or Process.engine is None or Process.controller is None:
        return
    Forced.measured = Forced.measured or Process.controller.context.rates
    Forced.text, rates = text, messages.Rates(*json.loads(text)) if text else Forced.measured
    if rates is not None:
        Process.engine.broadcast.send(rates)


class Forced:
    """Rates that `kv: auto` decides by, of one scheduler process."""

    text = ""
    measured: messages.Rates | None = None


def hold_grammar(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Block the compilation of a regex, in SGLang's thread, while the switch `grammars` is on."""
    while switch("grammars"):
        time.sleep(0.01)
    return stock(*args, **kwargs)


def overwrite_free_pages(flushed: bool, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Fill the pool with NaN after a flush, when every page is free.

    On a GPU a released pool is unmapped; here its memory would keep its contents and hide a copy that was never made.
    """
    if flushed:
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        for buffer in [*pool.k_buffer, *pool.v_buffer]:
            buffer.fill_(float("nan"))
    return flushed


def switch(name: str) -> str:
    """Return the value of a switch; empty when it is off."""
    try:
        return (FOLDER / name).read_text()
    except FileNotFoundError:
        return ""


def removable(name: str, without: Callable[..., Any]) -> Callable[..., Any]:
    """An AROUND hook: `without(guarded, *args)` is called instead while the guard `name` is removed."""

    def hook(guarded: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return without(guarded, *args, **kwargs) if switch("guard") == name else guarded(*args, **kwargs)

    return hook


def detect_stalls(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """While the switch `stalls` is on: one line per call that would make the host wait for a GPU (sync_detector.py)."""
    if not switch("stalls"):
        return stock(*args, **kwargs)
    with SyncDetector() as detector:
        result = stock(*args, **kwargs)
    with (FOLDER / "stalls.txt").open("a") as out:
        out.writelines(f"{kind} {call}\n" for kind in ("found", "reviewed") for call in getattr(detector, kind))
    return result


def on_rank_1(name: str, faulty: Callable[..., Any]) -> Callable[..., Any]:
    """An AROUND hook: `faulty(armed, stock, *args)` is called instead on rank 1 while the fault `name` is on."""
    from sglang_april.adapter.core.hooks_scheduler import Process
    from sglang_april.adapter.shapes.installed import shape

    def armed() -> bool:
        return switch("fault") == name

    def hook(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scheduler = Process.scheduler or args[0]  # functions of the start are passed a scheduler
        on_rank = hasattr(scheduler, "tp_worker") and shape.tp_rank(scheduler) == 1
        return faulty(armed, stock, *args, **kwargs) if on_rank and armed() else stock(*args, **kwargs)

    return hook


def raising(name: str) -> Callable[..., Any]:
    """An AROUND hook: raises in the process of the switch `exception` while that names this function."""
    from sglang_april.adapter.core.hooks_scheduler import Process

    def hook(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = f"rank {rank()}" if Process.scheduler is not None else "the HTTP process"
        if switch("exception") == f"{place}: {name}":
            raise RuntimeError("injected")
        return stock(*args, **kwargs)

    return hook


def whole_vocabulary(stock: Callable[..., Any], backend: Any, **fields: Any) -> None:
    """The grammar backend gets the size of the model's vocabulary, as in later releases.

    SGLang 0.5.15.post1 takes the tokenizer's, and excludes all other ids from every row of a batch with a grammar, so
    that a request's tokens depend on its neighbours (docs/sglang-versions.md).
    """
    stock(backend, **{"n_vocab": VOCAB_SIZE, **fields})


def install() -> None:
    from tests.support.delayed_relay import delay
    from tests.support.faults import EXCEPTIONS, FAULTS
    from tests.support.guards import GUARDS
    from tests.support.plain_layers import plain_layers

    if torch.cuda.is_available():
        plain_layers()
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", count_forward, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep", note_sleep, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_overlap", delay, HookType.AFTER)
    for part in ("get_next_batch_to_run", "run_batch", "process_batch_result"):
        HookRegistry.register(f"sglang.srt.managers.scheduler.Scheduler.{part}", detect_stalls, HookType.AROUND)
    note_copies(FOLDER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", overwrite_free_pages, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.constrained.llguidance_backend.GuidanceBackend.dispatch_regex", hold_grammar, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.constrained.llguidance_backend.GuidanceBackend.__init__", whole_vocabulary, HookType.AROUND
    )
    for name, (target, without) in GUARDS.items():
        HookRegistry.register(target, removable(name, without), HookType.AROUND)
    for name, (target, faulty) in FAULTS.items():
        HookRegistry.register(target, on_rank_1(name, faulty), HookType.AROUND)
    for name, target in EXCEPTIONS.items():
        HookRegistry.register(target, raising(name), HookType.AROUND)


install()

if __name__ == "__main__":
    main(sys.argv[1:])
