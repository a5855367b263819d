"""On the live server, any sequence of events delivers every sample exactly once (`delivered-once`).

The pools are small, so partials are evicted all the time, and `SGLANG_APRIL_CHECK` recounts them at every step.
"""

import itertools
import random
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.delivery_record import DeliveryRecord
from tests.support.live import LiveServer, until
from tests.support.workload import prompt

ROUNDS = 200
PER_STORY = 10
IDS = [f"p{i}" for i in range(16)]

DURING = ["", "", "", "push", "flush", "pause", "stop", "abort", "drop", "stock", "other"]
AFTER = ["", "", "", "push", "weights", "flush", "release", "drop", "abort", "stock", "other"]
ROUND = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**30),
        "prompts": st.integers(0, 6),
        "quota": st.sampled_from([1, 2, 3, 5, None]),
        "quota_unit": st.sampled_from(["group", "sample"]),
        "kv": st.sampled_from(["keep", "recompute", "auto"]),
        "max_staleness": st.sampled_from([5, 2, 1, 0]),
        "surplus": st.sampled_from(["carry", "return"]),
        "tier": st.sampled_from(["auto", "auto", "device", "host", "none"]),
        "concurrency": st.sampled_from([12, 5, 2]),
        "during": st.sampled_from(DURING),
        "after": st.sampled_from(AFTER),
    }
)


class EventSequence:
    """Consecutive rounds of one run, concurrent rounds of another, and events between and during them."""

    def __init__(self, live: LiveServer, run: str) -> None:
        self.live, self.server, self.run = live, live.server, run
        self.records = {run: DeliveryRecord(), f"{run}-other": DeliveryRecord()}
        self.rounds = dict.fromkeys(self.records, 0)

    def run_plan(self, plan: dict[str, Any]) -> None:
        rng = random.Random(plan["seed"])
        if not plan["during"]:
            self.round(self.run, rng, plan)
        else:
            with self.server.slowed(0.02):
                reply = self.live.in_background(self.round, self.run, rng, plan)
                until(lambda: self.live.running() or reply.done(), "the round runs, or is over")
                self.trigger(plan["during"], random.Random(plan["seed"] + 1), plan)
            self.live.result_of(reply)
        self.trigger(plan["after"], random.Random(plan["seed"] + 2), plan)

    def round(self, run: str, rng: random.Random, plan: dict[str, Any]) -> None:
        """Run one round; if it reuses an active id, check that it is refused without effect."""
        record = self.records[run]
        free = [name for name in IDS if name not in record.in_use]
        chosen = rng.sample(free, min(plan["prompts"], len(free)))
        prompts = [prompt(name, rng.randint(1, 24), ids=rng.choice([3, 9, 40]), n=rng.randint(1, 3)) for name in chosen]
        fields = ("quota", "quota_unit", "kv", "max_staleness", "surplus", "tier", "concurrency")
        body = {"run": run, "round_id": f"{run}-{self.rounds[run]}", **{name: plan[name] for name in fields}}
        if record.in_use and rng.random() < 0.2:
            used = prompt(rng.choice(sorted(record.in_use)), 3)
            self.server.rollout(**body, prompts=[*prompts, used], status=409)
        record.accept(prompts)
        record.deliver(self.server.rollout(**body, prompts=prompts))
        self.rounds[run] += 1

    def trigger(self, event: str, rng: random.Random, plan: dict[str, Any]) -> None:
        if event == "other":
            self.round(f"{self.run}-other", rng, plan)
        elif event:
            getattr(self, event)(rng)

    def push(self, rng: random.Random) -> None:
        self.live.push(0, flush=rng.random() < 0.5)

    def weights(self, rng: random.Random) -> None:
        self.live.load(0, flush=rng.random() < 0.5)

    def flush(self, rng: random.Random) -> None:
        self.server.post("/flush_cache" + rng.choice(["", "?timeout=60"]))

    def pause(self, rng: random.Random) -> None:
        self.server.post("/pause_generation", {"mode": rng.choice(["in_place", "retract", "abort"])})
        if rng.random() < 0.5:
            self.release(rng)
        self.server.post("/continue_generation", {"torch_empty_cache": False})

    def release(self, rng: random.Random) -> None:
        for action in ("release", "resume"):
            self.server.post(f"/{action}_memory_occupation", {"tags": ["kv_cache"]})

    def stop(self, rng: random.Random) -> None:
        for open_round in self.server.state()["rounds"]:
            self.server.post(f"/april/rounds/{open_round['round_id']}/stop")

    def abort(self, rng: random.Random) -> None:
        self.server.post("/abort_request", rng.choice([{"abort_all": True}, {"rid": "april"}]))

    def drop(self, rng: random.Random) -> None:
        ids = rng.sample(IDS, 4) if rng.random() < 0.7 else None
        self.records[self.run].drop(self.server.post("/april/drop", {"run": self.run, "ids": ids}))

    def stock(self, rng: random.Random) -> None:
        params = {"max_new_tokens": rng.randint(1, 20), "ignore_eos": True}
        answer = self.server.post("/generate", {"input_ids": [7] * rng.randint(1, 50), "sampling_params": params})
        assert len(answer["output_ids"]) == params["max_new_tokens"]

    def end(self) -> None:
        """Drain both runs and check that everything is delivered and no memory is held."""
        for run, record in self.records.items():
            record.deliver(self.server.rollout(run=run, prompts=[], quota=None))
            record.close()
        state = self.server.state()
        assert (state["closed"], sum(state["samples"].values()), state["pool"]["held"]) == ("", 0, 0)
        assert not any(state["tokens"].values()), state["tokens"]
        pool = state["pool"]
        assert pool["available"] + pool["evictable"] + pool["protected"] + pool["running"] == pool["total"]


def test_any_sequence_of_rounds_delivers_every_sample_once(small: LiveServer, run: str) -> None:
    """Random sizes, quotas, units, n, KV policies, tiers and events, from a fixed seed."""
    played: list[int] = []
    names = itertools.count()

    @settings(
        max_examples=ROUNDS // PER_STORY,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(plans=st.lists(ROUND, min_size=PER_STORY, max_size=PER_STORY))
    def sequences(plans: list[dict[str, Any]]) -> None:
        story = EventSequence(small, f"{run}-{next(names)}")
        for plan in plans:
            story.run_plan(plan)
        story.end()
        played.append(sum(story.rounds.values()))

    sequences()
    print(f"{sum(played)} rounds in {len(played)} sequences")
    assert sum(played) >= ROUNDS
