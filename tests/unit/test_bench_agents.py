"""bench.agents: which loads its options select, and which rows its table takes."""

from dataclasses import asdict
from typing import Any

from bench import agent_tables, agents
from bench.agent_turns import VARIANTS, Load


def chosen(*options: str) -> tuple[Load, ...]:
    args = agents.arguments([*options])
    return agents.chosen_loads(agents.PRESETS[args.preset], base_only=args.base_only, push_s=args.push_every)


def test_a_push_interval_of_its_own() -> None:
    paced = agents.PRESETS["paced"].loads
    assert chosen("--preset", "paced") == paced
    assert chosen("--preset", "paced", "--base-only") == paced[:1]
    (load,) = chosen("--preset", "paced", "--push-every", "16")
    assert asdict(load) == {**asdict(paced[0]), "push_s": 16.0}


def rows(run_id: str, push_s: float, rate: float) -> list[dict[str, Any]]:
    fields = {"bench": "agents turns", "preset": "paced", "run_id": run_id, "time": run_id, "turns": 8, "tool_s": 0.5}
    counts = {"trajectories": 2, "reprefilled_tokens": 14, "pushes": 1, "ratio": 1.0}
    return [
        {**fields, **counts, "push_s": push_s, "variant": variant, "trajectories_per_s": rate} for variant in VARIANTS
    ]


def test_each_load_comes_from_the_newest_run_that_has_it() -> None:
    given = [*rows("1", 10.0, 3.0), *rows("1", 0.0, 4.0), *rows("2", 10.0, 5.0), *rows("3", 16.0, 6.0)]
    used, cells = agent_tables.turns(given, "paced")
    assert {(row["run_id"], row["push_s"]) for row in used} == {("2", 10.0), ("1", 0.0), ("3", 16.0)}
    assert [line[2] for line in cells[1 :: len(VARIANTS)]] == ["5.00", "4.00", "6.00"]
