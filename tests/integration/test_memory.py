"""Fifty rounds in which more samples arrive than finish, with little device and host memory."""

from typing import Any

import psutil

from tests.support.delivery_record import DeliveryRecord
from tests.support.live import LiveServer
from tests.support.workload import prompt

ROUNDS = 50
ARRIVING, QUOTA = 6, 4
BOUND = 4
SETTLED = 15
"""Rounds after which every buffer has been used."""
GROWTH_MB = 60
"""Allowed growth of a scheduler process after that; all prompts and tokens together take less than one MB."""


def scheduler_mb(live: LiveServer) -> float:
    """Resident memory of the scheduler process."""
    assert live.server.process is not None
    children = psutil.Process(live.server.process.pid).children(recursive=True)
    (scheduler,) = [child for child in children if "scheduler" in " ".join(child.cmdline()) + child.name()]
    return scheduler.memory_info().rss / 2**20


def test_memory_stays_flat_over_fifty_rounds_with_a_growing_backlog(small: LiveServer, run: str) -> None:
    """Memory stays flat, no group exceeds the staleness bound, none is lost."""
    record, server = DeliveryRecord(), small.server
    cap, settled = server.state()["host_cap_tokens"], 0.0
    fallen_back = over = 0
    for i in range(ROUNDS):
        prompts = [prompt(f"p{i}-{j}", 20 + (7 * i + 11 * j) % 80, ids=8, n=2) for j in range(ARRIVING)]
        record.accept(prompts)
        reply = server.rollout(run=run, prompts=prompts, quota=QUOTA, max_staleness=BOUND)
        record.deliver(reply)
        carried: dict[str, Any] = reply["carried"]
        assert carried["tokens_by_tier"]["host"] <= cap
        assert carried["oldest_staleness"] <= BOUND
        over += reply["stats"]["over_bound"]
        pool = server.state()["pool"]
        assert pool["held"] + pool["protected"] <= pool["total"]
        if i % 3 == 2:
            small.push(0, flush=i % 2 == 0)
            tokens = server.state()["tokens"]
            fallen_back += tokens["disk"] + tokens["none"] > 0
        if i == SETTLED:
            settled = scheduler_mb(small)
    grown = scheduler_mb(small) - settled
    print(f"{len(record.missing)} samples carried, below the host after {fallen_back} pushes, {grown:.0f} MB more")
    assert (over, fallen_back > 0, len(record.missing) > 50) == (0, True, True)
    assert grown < GROWTH_MB
    record.deliver(server.rollout(run=run, prompts=[], quota=None))
    record.close()
    assert server.state()["pool"]["held"] == 0
