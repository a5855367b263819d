"""`--april-cpu-pace`: the overlap loop serves exact samples while its steps take the times of a table."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.pace_tables import TABLES
from tests.integration.conftest import OVERLAP, Pool
from tests.support.compare import by_key
from tests.support.live import LiveServer, live_server
from tests.support.workload import prompt

TABLE = TABLES / "qwen3-4b-h100.json"
LENGTH = 48


@pytest.fixture
def paced(pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """Overlap loop, Qwen3 shape."""
    server = pool.get("paced", [*OVERLAP, f"--april-cpu-pace={TABLE}"], forked=True)
    with live_server(server, lambda seed: models("qwen3", seed)) as live:
        yield live
    server.stop()


def test_paced_steps_take_the_tables_time_and_their_samples_are_exact(paced: LiveServer, run: str) -> None:
    """A step is no shorter than its table entry: a lower bound, which no load of the machine breaks."""
    server = paced.server
    requested = [prompt("greedy", LENGTH, temperature=0), prompt("drawn", LENGTH, n=3, temperature=1.0)]
    before = len(server.forwards())
    first = server.rollout(run=run, prompts=[*requested, prompt("short", LENGTH // 2)], quota=1)
    assert first["carried"]["samples"] == 4
    paced.push(1)
    groups = server.drain(run)
    samples = by_key(groups)
    assert len(samples) == 4
    assert {len(sample["output_ids"]) for sample in samples.values()} == {LENGTH}
    paced.check([*first["finished"], *groups], {"greedy": {"temperature": 0}, "drawn": {}, "short": {}})
    decodes = [forward["at"] for forward in server.forwards()[before:] if forward["decode"]]
    shortest_s = min(map(min, json.loads(TABLE.read_text())["decode_ms"]["ms"])) / 1e3
    # The overlap loop launches one step ahead, so steps are counted from the third launch on.
    assert decodes[-1] - decodes[0] >= (len(decodes) - 3) * shortest_s
