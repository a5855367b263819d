"""What storing a group's prompt once on the host saves, in tokens of KV: counts, not times.

    python -m bench.prompt_sharing --record       # seconds

Rounds are simulated (bench/simulated_rounds.py, `april-keep`) until the carry is steady. After each measured round, all
partials move to the host by the scheduler's own code (`Tiers`, `TierBudget`), with shared prompts and without.
`host_tokens`: tokens of whole store pages that they occupy there, which are also the tokens that are copied.
`evicted_tokens`: tokens of partials that lose their KV without sharing, if the host tier has exactly the room that they
need with it. Means over the measured rounds.
"""

import argparse
import json
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from bench.bookkeeping import PAGE, NoEngine
from bench.record import RESULTS, Row, append_rows, provenance
from bench.rollout.presets import PRESETS
from bench.rollout.variant import Plan
from bench.rollout.workload import Stream
from bench.simulated_engine import Costs, SimulatedGroup, SimulatedSample
from bench.simulated_rounds import Simulation
from examples import interrupt
from sglang_april.api.messages import Prompt
from sglang_april.kv.kv_pages import Pages
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.tiers import Tiers
from sglang_april.scheduler.version_clock import VersionClock

WARM, MEASURED = 12, 8
UNLIMITED = 2**40
COSTS = Costs(step_s=1.0, row_s=0.0)
"""Every step takes equally long: only the order in which samples finish matters."""


@dataclass(frozen=True)
class Case:
    """Sizes of one row."""

    name: str
    plan: Plan
    prompt: int
    """Tokens of a prompt."""
    mean: int
    """Tokens of a response; lengths are log-normal, up to 16 times as many."""


_CPU = PRESETS["cpu"]
_SIXTEEN = replace(_CPU.plan, n=16, groups=6)
CASES = (
    Case("cpu preset", _CPU.plan, _CPU.prompt_tokens, round(_CPU.mean)),
    Case("n 16, short responses", _SIXTEEN, 1000, 256),
    Case("n 16, responses as long as the prompt", _SIXTEEN, 1000, 1000),
    Case("n 16, long responses", _SIXTEEN, 1000, 4000),
)

Partial = tuple[SimulatedGroup, int]
"""A partial's group and its output tokens."""


class PartialsOfRounds(Simulation):
    """Notes the partials that each round leaves."""

    def __init__(self, case: Case) -> None:
        lengths = replace(_CPU, mean=case.mean, longest=16 * case.mean).lengths("lognormal")
        super().__init__("april-keep", case.plan, Stream(0, lengths, case.plan.n, case.prompt), COSTS)
        self.left: list[list[Partial]] = []

    def _suspend(self) -> None:
        samples: list[SimulatedSample] = [s for engine in self._engines for s in (*engine.running, *engine.queue)]
        self.left.append([(s.group, s.done) for s in samples if s.done])
        super()._suspend()


def to_host(partials: list[Partial], prompt: int, *, shared: bool, room: int) -> tuple[int, int]:
    """Move partials to a host tier of `room` tokens.

    Returns:
        Tokens in use there, and tokens of partials without KV afterwards.
    """
    engine: Any = NoEngine()
    context = Context(engine, VersionClock(), room, 0, PAGE)
    tiers = Tiers(context)
    samples = _suspended(context, partials, prompt, shared=shared)
    tiers.add_suspended(samples)
    for sample in samples:
        tiers.demote(sample)
    lost = sum(prompt + s.length for s in samples if s.kv.pages is None)
    return tiers.used["host"], lost


def _suspended(context: Context, partials: list[Partial], prompt: int, *, shared: bool) -> list[Sample]:
    """The partials as the ledger has them. With `shared`, one radix tree node owns the prompt of each group."""
    members: dict[SimulatedGroup, list[int]] = {}
    for group, done in partials:
        members.setdefault(group, []).append(done)
    prompts = [Prompt(str(i), b"\0" * 4 * prompt, len(done), 0, 0) for i, done in enumerate(members.values())]
    samples = []
    for accepted, lengths in zip(context.ledger.accept("run", prompts, [b""]), members.values(), strict=True):
        node = object() if shared else None
        for sample, length in zip(accepted.samples.values(), lengths, strict=True):
            context.ledger.admit(sample)
            sample.open_span(0, "fresh")
            sample.length = length
            sample.kv.pages = Pages(prompt + length - 1, prompt if shared else 0, True, node, None)
            context.ledger.suspend(sample)
            samples.append(sample)
    return samples


def measure(case: Case) -> Row:
    """One row."""
    rounds = PartialsOfRounds(case)
    rounds.run(WARM, MEASURED)
    found: dict[str, list[int]] = {"partials": [], "groups": [], "shared": [], "separate": [], "evicted": []}
    for partials in rounds.left[WARM:]:
        shared, _ = to_host(partials, case.prompt, shared=True, room=UNLIMITED)
        separate, _ = to_host(partials, case.prompt, shared=False, room=UNLIMITED)
        _, evicted = to_host(partials, case.prompt, shared=False, room=shared)
        values = (len(partials), len({group for group, _ in partials}), shared, separate, evicted)
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
    means = {name: round(mean(values)) for name, values in found.items()}
    sizes = {"n": case.plan.n, "slots": case.plan.slots, "quota": case.plan.groups, "prompt": case.prompt}
    return {
        "case": case.name,
        **sizes,
        "mean": case.mean,
        "partials": means["partials"],
        "groups": means["groups"],
        "host_tokens": {"shared": means["shared"], "separate": means["separate"]},
        "saved": round(1 - sum(found["shared"]) / sum(found["separate"]), 3),
        "evicted_tokens": means["evicted"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="append the rows to bench/results/prompt_sharing.json")
    args = parser.parse_args()
    origin = provenance()
    rows = [{**origin, "bench": "prompt_sharing", **measure(case)} for case in CASES]
    for row in rows:
        print(json.dumps({name: value for name, value in row.items() if name not in origin}))
    if args.record:
        append_rows(RESULTS / "prompt_sharing.json", rows)


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
