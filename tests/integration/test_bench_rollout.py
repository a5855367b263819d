"""bench.rollout on a live server: every variant runs, the identity holds, nothing is lost; no figure is asserted."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from bench.record import Row
from bench.rollout.engine import Engine
from bench.rollout.presets import PRESETS
from bench.rollout.run import KINDS, Bed, Runner
from tests.support.server import Server

FIELDS = {
    *("run_id", "preset", "distribution", "variant", "ablation", "repetition", "delivered_tokens_per_s"),
    *("delivered_groups_per_s", "share_of_limit", "samples_lost", "machine", "versions", "commit"),
}


def test_every_variant_keeps_its_books(server: Server, models: Callable[[str, int], Path], tmp_path: Path) -> None:
    rows: list[Row] = []
    preset = PRESETS["tiny"]
    facts = {"machine": {}, "versions": {}, "commit": ""}

    async def scene() -> int:
        async with Engine(server.url, patched=True) as engine:
            checkpoints = models("qwen3", 0), models("qwen3", 1)
            server.loaded = checkpoints[1]
            bed = Bed(engine, engine, checkpoints, preset, limits={(0, "lognormal"): 1.0})
            return await Runner(bed, facts, "smoke", rows.append).run(list(preset.cells()), time.monotonic() + 500)

    assert asyncio.run(scene()) == 0
    # A variant whose fields the server refuses has no row.
    assert {row["variant"] for row in rows} >= set(KINDS) - {"april-factor", "april-continue"}
    for row in rows:
        told = f"{row['variant']} {row['ablation']}"
        assert row.keys() >= FIELDS, told
        assert (row["samples_lost"], row["samples_twice"]) == (0, 0), told
        assert row["identity"] is (None if row["carry_source"] == "counter" else True), told
        assert row["delivered_samples"] >= row["rounds"] * preset.plan.samples * (not row["ablation"]), told
