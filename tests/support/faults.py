"""Faults of one rank (launch.py installs them).

While the server's switch `fault` names one of `FAULTS`, a function of rank 1 fails, corrupts its result, or blocks
until the switch is off. While the switch `exception` names a process and one of `EXCEPTIONS`, a function there
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
AGREEMENT = "sglang_april.adapter.core.rank_agreement."
START = "sglang_april.scheduler.resume.Resumer._start"


def _wait(armed: Armed, stock: Callable[..., Any], *args: Any) -> Any:
    while armed():
        time.sleep(0.01)
    return stock(*args)


def _no_space(_armed: Armed, _stock: Callable[..., Any], *_args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _flip(_armed: Armed, stock: Callable[..., Any], copies: Any, number: int, *args: Any) -> None:
    stock(copies, number, *args)
    copies._arena.pages(copies._held[number].ranges[0])[0, 0] ^= 4


def _start_reversed(_armed: Armed, stock: Callable[..., Any], resumer: Any, samples: list[Any]) -> None:
    stock(resumer, samples[::-1])


def _start_fewer(_armed: Armed, stock: Callable[..., Any], resumer: Any, samples: list[Any]) -> None:
    stock(resumer, samples[:-1])


def _start_none(_armed: Armed, stock: Callable[..., Any], resumer: Any, samples: list[Any]) -> None:
    stock(resumer, [])


def _another_flag(_armed: Armed, stock: Callable[..., Any], *args: Any) -> dict[str, str]:
    return {**stock(*args), "--april-quota": "5"}


def _smaller_budgets(_armed: Armed, stock: Callable[..., Any], s: Any, config: Any, pages: Any, budgets: Any) -> Any:
    return stock(s, config, pages, budgets._replace(host=320))


Fault = tuple[str, Callable[..., Any]]
"""The function, and what replaces it."""

COPY_FAULTS: dict[str, Fault] = {
    "slow copy": (KV + "stored_copies.StoredCopies.copy_to_host", _wait),
    "slow load": (KV + "stored_copies.StoredCopies.load", _wait),
    "full disk": (KV + "disk_tier.DiskTier._write_all", _no_space),
    "flipped bit": (KV + "stored_copies.StoredCopies.copy_to_host", _flip),
}
"""Faults that ranks agree on, and survive."""

FAULTS: dict[str, Fault] = {
    **COPY_FAULTS,
    "other flag": (AGREEMENT + "_compared", _another_flag),
    "little memory": (AGREEMENT + "agree", _smaller_budgets),
    "other order": (START, _start_reversed),
    "fewer started": (START, _start_fewer),
    "none started": (START, _start_none),
}

APRIL = "sglang_april."
EXCEPTIONS: dict[str, str] = {
    "detach": APRIL + "adapter.core.engine.SchedulerEngine.detach",
    "command": APRIL + "scheduler.commands.Commands.execute",
    "attached": APRIL + "scheduler.attached.Attached.begin",
    "progress": APRIL + "scheduler.controller.Controller.progress",
    "row seeds": APRIL + "adapter.core.sampler.RowSeeds.keep",
    "journal thread": APRIL + "recovery.journal.Journal._transaction",
    "event": APRIL + "http.service.AprilService.receive",
}
