"""CPU time of the store's bookkeeping with 100,000 partials, of comparing decisions, and bytes of a carried token.

    python -m bench.bookkeeping [--samples 100000] [--repeat 5] [--record]

Uses the real ledger, tiers and eviction queues on an engine that does nothing: no tensors, no copies. Aim: each under
20 µs. `suspend`: running samples become partials on the device. `lookup`: admission takes the next 64 partials until
none is left. `place`: every partial is demoted under a host budget of half of them and a disk budget of a quarter, so
that most newcomers evict a sample and are evicted. `decision_us` is what the comparison of decisions costs each TP rank
in a step that starts eight samples: digest, report, and the other rank's report in a thread; `plain_step_us` is its
cost in a step without a decision; both count all threads. Times are CPU time, which a busy machine affects little.
`token_bytes`: what an output token of a suspended sample takes (tracemalloc); `token_bytes_in_lists`: what it takes in
the lists in which SGLang collects it.
"""

import argparse
import json
import random
import threading
import time
import tracemalloc
from array import array
from types import SimpleNamespace
from typing import Any, cast

from bench.record import RESULTS, append_rows, provenance
from examples import interrupt
from sglang_april.adapter.core.sample_output import SampleOutput
from sglang_april.adapter.rank_channel import Inbox, Sender, new_secret
from sglang_april.api.messages import Prompt, RoundSpec
from sglang_april.kv.kv_pages import Pages
from sglang_april.scheduler.admission import pick
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.decisions import Decisions, PeerComparison
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.tiers import Tiers
from sglang_april.scheduler.version_clock import VersionClock

PAGE = 16
BATCH = 64
"""Number of samples suspended in one call."""


class NoEngine:
    """An engine whose copies succeed at once."""

    def __init__(self) -> None:
        self.orders: list[int] = []
        """Those whose end has not been reported."""

    def copy_out(self, _sample: Sample, order: int) -> None:
        self.orders.append(order)

    def spill(self, _sample: Sample, order: int) -> None:
        self.orders.append(order)

    def cancel(self, order: int) -> None: ...
    def discard(self, number: int) -> None: ...
    def free_pages(self, pages: Pages) -> None:
        pages.slots = None

    def release(self, sample: Sample) -> None:
        sample.kv.pages = None


def lengths(count: int) -> list[int]:
    """Log-normal lengths with a median of 2,000 and a maximum of 32,768 tokens."""
    rng = random.Random(0)
    return [min(32768, int(rng.lognormvariate(7.6, 1.0)) + 1) for _ in range(count)]


def running(count: int) -> tuple[Context, list[Sample]]:
    sizes = lengths(count)
    budget = sum(sizes)
    engine: Any = NoEngine()
    context = Context(engine, VersionClock(), budget // 2, budget // 4, PAGE)
    prompts = [Prompt(str(i), b"\0" * 16, 8, 0, 0) for i in range(count // 8)]
    groups = context.ledger.accept("run", prompts, [b""])
    samples = [s for g in groups for s in g.samples.values()]
    for sample, size in zip(samples, sizes, strict=False):
        context.ledger.admit(sample)
        sample.open_span(0, "fresh")
        sample.length = size
    return context, samples


def per_sample(act: Any, count: int) -> float:
    """Microseconds."""
    start = time.thread_time()
    act()
    return (time.thread_time() - start) * 1e6 / count


def measure(count: int) -> dict[str, float]:
    context, samples = running(count)
    tiers, engine = Tiers(context), cast("NoEngine", context.engine)

    def suspend() -> None:
        for first in range(0, len(samples), BATCH):
            batch = samples[first : first + BATCH]
            for sample in batch:
                sample.kv.pages = Pages(sample.length, 0, True, None, None)
                context.ledger.suspend(sample)
            tiers.add_suspended(batch)

    def place() -> None:
        for first in range(0, len(samples), BATCH):
            for sample in samples[first : first + BATCH]:
                tiers.demote(sample)
            moved: Any = SimpleNamespace(done=engine.orders, failed={})
            tiers.orders_ended(moved)
            engine.orders.clear()

    run = context.ledger.runs["run"]
    fields: Any = {"quota": 1, "quota_unit": "group", "kv": "keep", "max_staleness": 5}
    rounds = [Round(RoundSpec(round_id="r", run="run", **fields), run, 1)]

    def look_up() -> None:
        while chosen := pick(rounds, BATCH):
            for sample in chosen:
                tiers.prepare_resume(sample)
                sample.kv.pages = None
                context.ledger.admit(sample)

    found = {"suspend_us": per_sample(suspend, len(samples)), "lookup_us": per_sample(look_up, len(samples))}
    suspend()
    return {**found, "place_us": per_sample(place, len(samples)), **compare_decisions(20_000)}


def compare_decisions(steps: int) -> dict[str, float]:
    """Two ranks in one process, connected by real sockets; microseconds of one rank's step, its thread included."""
    _, samples = running(8)
    secret = new_secret()
    inbox, decisions, comparison = Inbox(0, None), Decisions(), PeerComparison(0, 0)
    sender = Sender(0, 0, inbox.address, secret)
    arrived = threading.Semaphore(0)

    def received(_: int, body: Any) -> None:
        comparison.received(body)
        arrived.release()

    inbox.read(secret, received)

    def step(number: int) -> None:
        decided = decisions.end_step(number)
        if decided is not None:
            sender.send(decided)
        comparison.launched(number, decided)

    began = time.process_time()
    for number in range(steps):
        decisions.add("start", samples)
        step(number)
        arrived.acquire()
    decided = time.process_time()
    for number in range(steps, 2 * steps):
        step(number)
    plain = time.process_time()
    return {"decision_us": (decided - began) * 1e6 / steps, "plain_step_us": (plain - decided) * 1e6 / steps}


def token_bytes(samples: int = 16, tokens: int = 4000) -> dict[str, float]:
    """Bytes per output token: in SGLang's lists, and in the arrays of a suspended sample."""
    rng = random.Random(0)
    tracemalloc.start()
    reqs: list[Any] = []
    for _ in range(samples):
        ids = [rng.randrange(1000, 150_000) for _ in range(tokens)]
        lists = {"output_token_logprobs_val": [rng.random() for _ in ids], "output_token_logprobs_idx": ids}
        logprob = SimpleNamespace(**lists, output_top_logprobs_val=None)
        whole = array("q", ids)
        reqs.append(SimpleNamespace(output_ids=array("q", ids), full_untruncated_fill_ids=whole, logprob=logprob))
    del ids, lists, logprob, whole
    in_lists = tracemalloc.get_traced_memory()[0]
    outputs = [SampleOutput() for _ in reqs]
    for req, output in zip(reqs, outputs, strict=True):
        output.pack(req)
    packed = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    count = samples * tokens
    return {"token_bytes_in_lists": round(in_lists / count, 1), "token_bytes": round(packed / count, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="number of partials (%(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions, of which the fastest counts (%(default)s)")
    parser.add_argument("--record", action="store_true", help="append the row to bench/results/bookkeeping.json")
    args = parser.parse_args()
    runs = [measure(args.samples) for _ in range(args.repeat)]
    middle = {name: round(sorted(r[name] for r in runs)[len(runs) // 2], 2) for name in runs[0]}
    row = {**provenance(), "bench": "bookkeeping", "samples": args.samples, "repeat": args.repeat, **middle}
    row |= token_bytes()
    print(json.dumps(row, indent=1))
    if args.record:
        append_rows(RESULTS / "bookkeeping.json", [row])


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
