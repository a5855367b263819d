"""S9: two ranks on the CPU decide alike at every step, whatever happens between the steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import Live, living, until
from tests.support.server import Server
from tests.support.workload import prompt

ROUNDS = 20
PARAMS: dict[str, Any] = {"temperature": 0.8}


@pytest.fixture
def two_ranks(tp2: Server, models: Callable[[str, int], Path]) -> Iterator[Live]:
    with living(tp2, lambda seed: models("llama", seed)) as live:
        yield live


def digests(live: Live) -> list[list[str]]:
    """The lines of each rank: step, and a hash of all decisions so far."""
    folder = Path(live.server.env["SGLANG_APRIL_DIGEST"])
    return [(folder / f"rank{rank}.log").read_text().splitlines() for rank in (0, 1)]


def between(live: Live, run: str, i: int) -> None:
    """What happens after round `i`."""
    server = live.server
    match i % 5:
        case 0:
            live.push(1 + i // 5 % 2, flush=i % 2 == 0)
        case 1:
            server.post("/flush_cache")
        case 2:
            server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
            server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        case 3:
            server.post("/april/drop", {"run": run, "ids": [f"p{i}-1"]})


def inside(live: Live, run: str, i: int, reply: Any) -> None:
    """What happens while round `i` is open."""
    server = live.server
    match i % 4:
        case 0:
            live.push(i % 3)
        case 1:
            server.post("/pause_generation", {"mode": ["in_place", "retract", "abort"][i % 3]})
            server.post("/continue_generation", {"torch_empty_cache": False})
        case 2:
            server.post("/flush_cache")
        case 3:
            server.post("/abort_request", {"abort_all": True})
    until(lambda: live.running() or reply.done(), "the round goes on, or has ended")


def test_twenty_rounds_decide_alike_on_both_ranks(two_ranks: Live, run: str) -> None:
    """Suspends, resumes, pushes, flushes, pauses, releases, drops, aborts and retracts: equal digests at every step."""
    server, groups = two_ranks.server, []
    for i in range(ROUNDS):
        prompts = [prompt(f"p{i}-{j}", 6 + 3 * j, n=2, **PARAMS) for j in range(4)]
        tier = ["auto", "device", "host", "none"][i % 4]
        body = {"run": run, "prompts": prompts, "quota": 3, "tier": tier, "kv": ["keep", "recompute"][i % 2]}
        if i % 2:
            groups += server.rollout(**body)["finished"]
        else:
            with server.slowed(0.05):
                reply = two_ranks.beside(server.rollout, **body)
                until(lambda reply=reply: two_ranks.running() or reply.done(), "the round runs")
                inside(two_ranks, run, i // 2, reply)
            groups += two_ranks.done(reply)["finished"]
        between(two_ranks, run, i)
    groups += server.drain(run)
    assert len({(g["id"], g["incarnation"]) for g in groups}) == len(groups)
    two_ranks.check(groups, {g["id"]: PARAMS for g in groups})
    until(lambda: len({lines[-1].split()[1] for lines in digests(two_ranks)}) == 1, "both ranks have decided the same")
    first, second = digests(two_ranks)
    assert len({line.split()[1] for line in first}) > 2 * ROUNDS, "the digest does not move with the decisions"
    different = [pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]]
    assert not different, f"the ranks part at {different[0]}"
