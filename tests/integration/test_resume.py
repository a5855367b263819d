"""Stopped and resumed samples match uninterrupted ones (`exact-resume`, `seed-independence`)."""

from typing import Any

import pytest

from sglang_april.scheduler.state import sample_seed
from tests.support.background import BackgroundRound
from tests.support.compare import Key, assert_near, assert_same, by_key, stock_noise
from tests.support.live import until
from tests.support.server import SLOTS, Server
from tests.support.workload import in_one_round, in_rounds, prompt, stoppers

STOPS = [6, 11, 17, 22, 28, 33, 39, 44]
"""Output tokens at which the eight rounds stop."""
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "sampling_seed": 7},
}
CUTS = {"none": {}, "top_k": {"top_k": 20}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1}}


@pytest.fixture(params=["server", "overlap"])
def each_loop(request: pytest.FixtureRequest) -> Server:
    """Qwen3 shape with the normal loop, then Llama shape with the overlap loop."""
    return request.getfixturevalue(request.param)


class Unbroken:
    """Reference samples that were never stopped, generated once per server."""

    def __init__(self) -> None:
        self._made: dict[tuple[Server, str], dict[Key, dict[str, Any]]] = {}

    def get(self, server: Server, run: str, sampling: str) -> dict[Key, dict[str, Any]]:
        if (server, sampling) not in self._made:
            name = f"{run}-unbroken"
            self._made[server, sampling] = in_one_round(server, name, workload(), sampling_params=SAMPLING[sampling])
        return self._made[server, sampling]


@pytest.fixture(scope="module")
def unbroken() -> Unbroken:
    return Unbroken()


def workload() -> list[dict[str, Any]]:
    return [*stoppers(STOPS), *(prompt(f"group-{i}", 48 + 3 * i, n=4, top_logprobs_num=2) for i in range(4))]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_eight_stops_give_bit_identical_samples(
    each_loop: Server, unbroken: Unbroken, run: str, tier: str, sampling: str
) -> None:
    """In the same batch, a sample resumed on kept KV has the same tokens and logprobs, and one span."""
    wanted = unbroken.get(each_loop, run, sampling)
    samples, replies = in_rounds(each_loop, run, workload(), 8, tier=tier, sampling_params=SAMPLING[sampling])
    for reply in replies[:-1]:
        assert reply["carried"]["tokens_by_tier"][tier] > 0
        assert sum(reply["carried"]["tokens_by_tier"].values()) == reply["carried"]["tokens_by_tier"][tier]
    assert [r["stats"]["resumed_kept"] for r in replies[1:]] == [23 - i for i in range(8)]
    assert sum(r["stats"]["reprefilled_tokens"] for r in replies) == 0
    assert all(reply["stats"]["kv_lost"] == 0 for reply in replies)
    assert_same(samples, wanted)
    assert all(len(s["spans"]) == 1 and s["spans"][0]["kv"] == "fresh" for s in samples.values())


@pytest.mark.parametrize("sampling", SAMPLING)
def test_eight_recomputes_stay_within_stock_noise(
    each_loop: Server, unbroken: Unbroken, run: str, sampling: str
) -> None:
    """With tokens only (tier `none`) a resume prefills again: within 4 x the stock server's noise."""
    wanted = unbroken.get(each_loop, run, sampling)
    samples, replies = in_rounds(each_loop, run, workload(), 8, tier="none", sampling_params=SAMPLING[sampling])
    assert [r["stats"]["resumed_recomputed"] for r in replies[1:]] == [23 - i for i in range(8)]
    assert all(r["stats"]["kv_fallback"] == r["stats"]["resumed_recomputed"] for r in replies)
    assert_near(samples, wanted, stock_noise(each_loop), seeded=sampling == "seeded")
    for (name, _, _), sample in samples.items():
        kinds = ["fresh", "recomputed"][: 1 if name == "stop-6" else 2]
        assert [span["kv"] for span in sample["spans"]] == kinds
        assert sample["spans"][-1]["end"] == len(sample["output_ids"])


@pytest.mark.parametrize("sampling", SAMPLING)
def test_other_samples_in_the_batch_only_add_stock_noise(
    each_loop: Server, unbroken: Unbroken, run: str, sampling: str
) -> None:
    """Samples resume from every tier in turn, in batches with other samples."""
    wanted = unbroken.get(each_loop, run, sampling)
    body = {"run": run, "sampling_params": SAMPLING[sampling]}
    groups = each_loop.rollout(prompts=workload(), quota=2, tier="device", **body)["finished"]
    for i, tier in enumerate(["host", "none", "disk", "device"]):
        reply = each_loop.rollout(prompts=[prompt(f"new-{i}", 30, n=5)], quota=1, tier=tier, **body)
        assert reply["stats"]["resumed_recomputed" if i == 2 else "resumed_kept"] > 0, f"before {tier}"
        assert reply["stats"]["kv_lost"] == 0
        groups += reply["finished"]
    groups += each_loop.drain(run)
    samples = {key: sample for key, sample in by_key(groups).items() if not key[0].startswith("new")}
    assert_near(samples, wanted, stock_noise(each_loop), seeded=sampling == "seeded")


def test_resumes_while_all_slots_are_busy(overlap: Server, run: str) -> None:
    """Each sample that resumes gets the slot of a request that has just ended.

    On a GPU, the forward in flight may still relay a token for that slot; servers of tests delay the relay likewise
    (tests/support/delayed_relay.py).
    """
    params = {"temperature": 1.0, "sampling_seed": 5}
    long = [*stoppers([4]), *(prompt(f"long-{i}", 20, n=2) for i in range(SLOTS // 2 - 1))]
    wanted = in_one_round(overlap, f"{run}-unbroken", long, sampling_params=params)
    groups = overlap.rollout(run=run, prompts=long, quota=1, sampling_params=params)["finished"]
    busy = [prompt(f"busy-{i}", 40 + i) for i in range(SLOTS)]
    with overlap.slowed(0.02):
        other = BackgroundRound(overlap, run=f"{run}-busy", prompts=busy, quota=None, sampling_params=params)
        until(lambda: overlap.state()["samples"]["running"] == SLOTS, "all slots are busy")
        groups += overlap.drain(run)
    other.reply()
    assert_near(by_key(groups), wanted, stock_noise(overlap), seeded=True)


def test_tokens_depend_only_on_seed_and_position(each_loop: Server, run: str) -> None:
    """The same seeds give the same tokens for any order, slot, batch and number of stops."""
    params = {"temperature": 1.0, "sampling_seed": 11}
    cut = [prompt(f"{name}-{i}", 16 + i, n=2, **values) for name, values in CUTS.items() for i in range(2)]
    prompts = [*stoppers([5, 10]), *cut]
    wanted = in_one_round(each_loop, run, prompts, sampling_params=params)
    backwards = in_one_round(each_loop, f"{run}-backwards", prompts[::-1], sampling_params=params)
    few = in_one_round(each_loop, f"{run}-few", prompts, sampling_params=params, concurrency=7)
    in_legs, _ = in_rounds(each_loop, f"{run}-legs", prompts[::-1], 2, sampling_params=params, concurrency=9)
    for other in (backwards, few, in_legs):
        assert_near(other, wanted, stock_noise(each_loop), seeded=True)
    reseeded = in_one_round(each_loop, f"{run}-reseeded", prompts, sampling_params={**params, "sampling_seed": 12})
    assert all(reseeded[key]["output_ids"] != sample["output_ids"] for key, sample in wanted.items())


def test_group_members_differ_and_report_their_seeds(each_loop: Server, run: str) -> None:
    """Seed = 63 bits of hash(sampling seed, id, incarnation, index), returned with the sample."""
    prompts = [prompt("a", 12, n=3), prompt("b", 12, ids=[50, 60, 70], n=3, sampling_seed=4)]
    samples = in_one_round(each_loop, run, prompts, sampling_params={"temperature": 1.0, "sampling_seed": 3})
    for (name, incarnation, index), sample in samples.items():
        assert sample["seed"] == sample_seed({"a": 3, "b": 4}[name], name, incarnation, index)
        assert 0 <= sample["seed"] < 2**63
    assert len({tuple(s["output_ids"]) for s in samples.values()}) == len(samples)


def test_reused_id_gets_a_new_incarnation(each_loop: Server, run: str) -> None:
    """A delivered id may be used again; its incarnation counts up, also after a drop, and its samples differ."""
    body = {"prompts": [prompt("again", 16, n=2)], "quota": None, "sampling_params": {"temperature": 1.0}}
    drawn = []
    for incarnation in (0, 1):
        (group,) = each_loop.rollout(run=run, **body)["finished"]
        assert group["incarnation"] == incarnation
        drawn += [tuple(s["output_ids"]) for s in group["samples"]]
    each_loop.rollout(run=run, prompts=[*body["prompts"], *stoppers([4])], quota=1)
    each_loop.post("/april/drop", {"run": run, "ids": ["again"]})
    (group,) = each_loop.rollout(run=run, **body)["finished"]
    assert group["incarnation"] == 3
    drawn += [tuple(s["output_ids"]) for s in group["samples"]]
    assert len(set(drawn)) == len(drawn)
    (first,) = each_loop.rollout(run=f"{run}-other", **body)["finished"]
    assert first["incarnation"] == 0
    assert [tuple(s["output_ids"]) for s in first["samples"]] == drawn[:2]
