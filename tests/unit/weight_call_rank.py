"""One rank of a weight call, in a process of its own: how all ranks combine the ranks' outcomes."""

from collections.abc import Sequence
from typing import Any

import torch

from sglang_april.adapter.core import hooks_control


def report_outcomes(rank: int, calls: Sequence[int | None], store: str, outcomes: Any) -> None:
    """Put (rank, failing, combined outcome) of each call into `outcomes`; `calls` has the rank that fails, or None."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for failing in calls:
        own = (False, "bad tensor") if rank == failing else (True, "loaded")
        outcomes.put((rank, failing, hooks_control._combine_over_ranks(torch.distributed.group.WORLD, *own)))
