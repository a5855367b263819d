"""Faults of one rank (launch.py installs them).

While the server's switch `fault` names one of `FAULTS`, a function of rank 1 fails, corrupts its result, or blocks
until the switch is off. While the switch `exception` names a rank and one of `EXCEPTIONS`, a function of that rank
raises what the plugin does not expect.
"""

import errno
import os
import time
from collections.abc import Callable
from typing import Any

Armed = Callable[[], bool]
"""Returns whether the switch is still on."""
KV = "sglang_april.kv."


def _wait(armed: Armed, stock: Callable[..., Any], *args: Any) -> Any:
    while armed():
        time.sleep(0.01)
    return stock(*args)


def _no_space(_armed: Armed, _stock: Callable[..., Any], *_args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _flip(_armed: Armed, stock: Callable[..., Any], store: Any, number: int, *args: Any) -> None:
    stock(store, number, *args)
    store._arena.pages(store._held[number].ranges[0])[0, 0] ^= 4


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "slow copy": (KV + "page_store.PageStore._copy_to_host", _wait),
    "slow load": (KV + "page_store.PageStore._load", _wait),
    "full disk": (KV + "disk_tier.DiskTier._write_all", _no_space),
    "flipped bit": (KV + "page_store.PageStore._copy_to_host", _flip),
}

APRIL = "sglang_april."
EXCEPTIONS: dict[str, str] = {
    "detach": APRIL + "adapter.v0_5_17.engine.SchedulerEngine.detach",
    "command": APRIL + "scheduler.commands.Commands.execute",
    "progress": APRIL + "scheduler.controller.Controller.progress",
    "row seeds": APRIL + "adapter.v0_5_17.sampler.RowSeeds.keep",
    "journal thread": APRIL + "recovery.journal.Journal._transaction",
    "store thread": KV + "page_store.PageStore._copy_to_host",
}
