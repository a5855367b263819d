"""One rank of a weight call, in a process of its own: how all ranks combine the ranks' outcomes."""

from typing import Any

import torch

from sglang_april.adapter.core import hooks_control


def report_outcome(rank: int, failing: int | None, store: str, outcomes: Any) -> None:
    """Put (rank, combined outcome) into `outcomes`; rank `failing` could not load the weights."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    own = (False, "bad tensor") if rank == failing else (True, "loaded")
    outcomes.put((rank, hooks_control._combine_over_ranks(torch.distributed.group.WORLD, *own)))
