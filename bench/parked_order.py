"""How many tokens agents prefill again under different orders in which parked KV is discarded.

    python -m bench.parked_order

A simulation in counts, without an engine: trajectories of 3-8 turns whose prompt grows, tools whose delay has a short
or a long tail, and one trajectory in thirty that never returns.
A budget holds a share of what all would keep. Prints, per order,
the share of the prompts' known tokens that must be prefilled again. `known future` discards what returns last.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from examples import interrupt

AGENTS, REQUESTS = 64, 4000
TOKENS = 3000
"""Mean length of a parked sequence."""
ABANDONED = 1 / 30

DELAYS: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda rng: rng.expovariate(1 / 40),
    "log-normal": lambda rng: rng.lognormvariate(3.0, 1.2),
    "Pareto": lambda rng: 8 * rng.paretovariate(1.2),
}
"""Tool delays in decode steps of some length."""


@dataclass(slots=True)
class Parked:
    since: float
    returns: float
    tokens: int


ORDERS: dict[str, Callable[[Parked, float], float]] = {
    "parked first": lambda kv, _: kv.since,
    "shortest first": lambda kv, _: kv.tokens,
    "tokens x age": lambda kv, delay: kv.since + delay * kv.tokens / TOKENS,
    "known future": lambda kv, _: -kv.returns,
}
"""What is discarded first has the least value; the second argument is the mean delay observed so far."""


def again(order: str, delay: str, share: float, seed: int) -> float:
    """The share of tokens that are prefilled again."""
    rng, budget = random.Random(seed), share * AGENTS * TOKENS
    events = [(rng.random() * 50, i, 0, rng.randint(3, 8)) for i in range(AGENTS)]
    parked: dict[int, Parked] = {}
    born, known, lost, waited, returned = AGENTS, 0, 0, 40.0, 1
    heapq.heapify(events)
    for _ in range(REQUESTS):
        now, agent, tokens, turns = heapq.heappop(events)
        known += tokens
        if (kv := parked.pop(agent, None)) is not None:
            waited, returned = waited + now - kv.since, returned + 1
        else:
            lost += tokens
        tokens += rng.randint(200, 1500)
        ends = now + tokens / 500
        abandoned = rng.random() < ABANDONED
        if turns == 1 or abandoned:
            heapq.heappush(events, (ends, born, 0, rng.randint(3, 8)))
            born += 1
        if turns == 1:
            continue
        returns = math.inf if abandoned else ends + DELAYS[delay](rng)
        if not abandoned:
            heapq.heappush(events, (returns, agent, tokens, turns - 1))
        parked[agent] = Parked(ends, returns, tokens)
        while sum(kv.tokens for kv in parked.values()) > budget:
            del parked[min(parked, key=lambda a: ORDERS[order](parked[a], waited / returned))]
    return lost / known


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="runs of each row, whose mean is printed (4)")
    args = parser.parse_args()
    print("| tool delay | budget | " + " | ".join(ORDERS) + " |\n| --- | --- |" + " --- |" * len(ORDERS))
    for delay in DELAYS:
        for share in (0.25, 0.5, 0.75):
            rows = [sum(again(order, delay, share, s) for s in range(args.seeds)) / args.seeds for order in ORDERS]
            print(f"| {delay} | {share:.0%} | " + " | ".join(f"{row:.1%}" for row in rows) + " |")


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
