"""Benchmarks on a live server: every variant accounts for its tokens, every stop ends. No rate is asserted."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import agents, kernel_cases, overhead, resume, round_memory, stop_latency, suspend
from bench.record import Row
from bench.rollout.engine_client import EngineClient
from bench.rollout.presets import PRESETS
from bench.rollout.runner import KINDS, Runner
from bench.rollout.testbed import Testbed
from bench.server_pairs import measure
from tests.support.server import Server

FIELDS = {
    *("run_id", "preset", "distribution", "variant", "ablation", "repetition", "delivered_tokens_per_s"),
    *("delivered_groups_per_s", "share_of_limit", "samples_lost", "machine", "versions", "commit"),
}


def test_every_variant_accounts_for_its_tokens(
    server: Server, models: Callable[[str, int], Path], tmp_path: Path
) -> None:
    rows: list[Row] = []
    preset = PRESETS["tiny"]
    common = {"machine": {}, "versions": {}, "commit": ""}

    async def scene() -> int:
        async with EngineClient(server.url, patched=True) as engine:
            checkpoints = models("qwen3", 0), models("qwen3", 1)
            server.loaded = checkpoints[1]
            testbed = Testbed(engine, engine, checkpoints, preset, given_limit=1.0)
            return await Runner(testbed, common, "smoke", rows.append).run(list(preset.cells()), time.monotonic() + 500)

    assert asyncio.run(scene()) == 0
    # A variant whose fields the server refuses has no row.
    assert {row["variant"] for row in rows} >= set(KINDS) - {"april-factor", "april-continue"}
    assert {row["ablation"] for row in rows} == {None, "drain", "filter"}
    for row in rows:
        reported = f"{row['variant']} {row['ablation']}"
        assert row.keys() >= FIELDS, reported
        assert (row["samples_lost"], row["samples_twice"]) == (0, 0), reported
        assert row["identity"] is (None if row["carry_source"] == "counter" else True), reported
        assert row["delivered_samples"] >= row["rounds"] * preset.plan.samples * (not row["ablation"]), reported


@pytest.mark.parametrize(("encoding", "stock"), [("json", False), ("msgpack", False), ("json", True)])
def test_memory_of_every_process_of_a_round(server: Server, encoding: str, stock: bool) -> None:
    rows = round_memory.measure(server.url, 2 * round_memory.GROUP, 12, encoding, stock=stock)
    assert {row["process"] for row in rows} == {"HTTP", "scheduler", "detokenizer"}
    for row in rows:
        assert min(row["idle_mb"], row["peak_mb"]) > 50, row
        assert row["body_mb"] * 2**20 > 8 * row["tokens"]  # ids and logprobs


def test_stop_latency_of_both_variants(server: Server) -> None:
    async def scene() -> list[Row]:
        async with EngineClient(server.url, patched=True) as engine:
            actual = [await stop_latency.batch_quota(engine, 6, packed) for packed in (False, True)]
            big = await stop_latency.big_reply(engine, 4, 20)
            return [*actual, await stop_latency.outside(engine, 6), *big]

    rows = asyncio.run(scene())
    assert all(row["latency_ms"] > 0 for row in rows)
    assert [row["tokens_after_end"] for row in rows[:2]] == [0, 0]  # the normal loop
    assert [row["reply_tokens"] for row in rows[3:]] == [20, 20]
    assert not server.state()["rounds"]


def test_suspend_and_resume_are_timed_in_every_tier(
    server: Server, models: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspend, "AT_LEAST", 4)
    # Importing SGLang's pool takes longer than all else here.
    monkeypatch.setattr(kernel_cases, "_sglang_pool", lambda *_: (None, "left out of the test"))
    plan = suspend.SuspendPlan(samples=3, beside=2, prompt=24, output=3, length=1500, repetitions=2)
    server.loaded = models("qwen3", 0)
    rows = asyncio.run(suspend.measure(server.url, server.folder, plan, server.loaded, False))
    tiers, sglang = rows[:-1], rows[-1]
    assert [row["tier"] for row in tiers] == list(suspend.TIERS)
    assert [(row["suspended"], row["resumed"]) for row in tiers] == [(2 * 3, 2 * 3)] * 4
    assert [row["kv_tokens"] >= 3 * 24 for row in tiers] == [True, True, True, False]
    assert all(row["steps_seen"] >= 2 * 4 and row["reply_ms_p50"] > 0 and row["resume_ms_p50"] > 0 for row in tiers)
    assert [row["copy_ms_p50"] > 0 for row in tiers] == [False, True, True, False]
    assert sglang["skipped"]
    assert not sum(server.state()["samples"].values())


def test_resumed_samples_are_compared_with_uninterrupted_ones(server: Server) -> None:
    rows = asyncio.run(resume.measure(server.url, samples=3, tokens=24, length=40))
    assert [row["tier"] for row in rows] == list(suspend.TIERS)
    assert all(row["suspended"] == 3 and resume.passed(row, 1e-5) for row in rows), rows
    assert not resume.passed({**rows[0], "first_token_equal": 0.8}, 0.0)
    assert not resume.passed({**rows[1], "logprob_gap": 0.2}, 0.1)
    assert not resume.passed({**rows[2], "resumed_kept": 0}, 0.1)


def test_agents_of_every_variant_finish_over_pushes(server: Server, models: Callable[[str, int], Path]) -> None:
    checkpoints = models("qwen3", 0), models("qwen3", 1)
    server.loaded = checkpoints[1]
    preset = agents.PRESETS["smoke"]

    async def scene() -> list[Row]:
        async with EngineClient(server.url, patched=True) as engine:
            return await agents.measure_turns(engine, engine, preset, checkpoints, {})

    with server.slowed(0.02):
        rows = asyncio.run(scene())
    assert [row["variant"] for row in rows] == list(agents.VARIANTS)
    for row in rows:
        assert row["pushes"] >= 1, row["variant"]
        assert row["trajectories_per_s"] > 0
    attached, trajectory, resent, in_place = rows
    assert [row["resent_requests"] for row in (attached, trajectory, in_place)] == [0, 0, 0]
    assert resent["resent_requests"] > 0
    assert resent["reprefilled_tokens"] > trajectory["reprefilled_tokens"]
    assert not server.state()["attached"]


def test_serving_pairs(server: Server, models: Callable[[str, int], Path]) -> None:
    rows = [
        row
        for pair in overhead.pairs(server.url, server.url, None, endless=2000)
        for row in measure(
            pair, models("qwen3", 0), prompts=4, at_once=2, seed=1, together=False, reverse=pair.case == "attached"
        )
    ]
    cases = ["stock beside unattached", "unattached", "stock beside attached", "attached"]
    assert [row["case"] for row in rows] == [*cases, "stock beside round open", "round open"]
    assert all(row["output_tokens_per_s"] > 0 and row["cpu_ms_per_request"] > 0 for row in rows)
    assert not server.state()["rounds"]
