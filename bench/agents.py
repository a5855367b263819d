"""Multi-turn agents over weight pushes: requests attached to a run against SGLang's own (`bench/agent_turns.py`).

    python -m bench.agents --preset cpu
    python -m bench.agents --preset paced
    python -m bench.agents --preset paced --push-every 16 --repetitions 3    # twice in a trajectory of about 33 s
    python -m bench.agents --preset paced-32b                                # twice in a trajectory of about 75 s

Ratios are to `resend` within one run. What attaching itself costs: `bench.overhead`.
"""

import argparse
import asyncio
import json
import tempfile
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench import record
from bench.agent_turns import ATTACHED, VARIANTS, Agents, Load
from bench.pace_tables import TABLES
from bench.random_checkpoint import two_policies
from bench.rollout.engine_client import EngineClient
from bench.rollout.servers import Size, both_servers
from examples import interrupt


@dataclass(frozen=True)
class AgentsPreset:
    """Sizes of the servers, and the loads."""

    name: str
    slots: int
    context: int
    loads: tuple[Load, ...]
    repetitions: int
    shape: str = "tiny"
    pace: Path | None = None


_SMOKE = Load(3, 4, 3, 20, 12, 8, 0.02, 0.3)
_CPU = Load(32, 96, 8, 64, 32, 16, 0.1, 4.0)
_PACED = Load(64, 128, 8, 1024, 256, 128, 0.5, 10.0)
_PACED_32B = replace(_PACED, push_s=36.0)
"""A push twice in a trajectory, at the pace of a big model."""


def _grid(base: Load) -> tuple[Load, ...]:
    """The base, and one change at a time of turns, tool latency and push frequency."""
    fewer = replace(base, turns=base.turns // 4, trajectories=4 * base.trajectories)
    slow_tool, rare, none = (
        replace(base, tool_s=4 * base.tool_s),
        replace(base, push_s=4 * base.push_s),
        replace(base, push_s=0.0),
    )
    return base, fewer, slow_tool, rare, none


PRESETS = {
    preset.name: preset
    for preset in (
        AgentsPreset("smoke", 8, 2048, (_SMOKE,), 1),
        AgentsPreset("cpu", 32, 4096, _grid(_CPU), 3),
        AgentsPreset("paced", 64, 8192, _grid(_PACED), 1, pace=TABLES / "qwen3-4b-h100.json", shape="paced"),
        AgentsPreset("paced-32b", 64, 8192, (_PACED_32B,), 2, pace=TABLES / "qwen3-32b-mi300x.json", shape="paced"),
    )
}


async def measure_turns(
    stock: EngineClient, april: EngineClient, preset: AgentsPreset, checkpoints: tuple[Path, Path], common: record.Row
) -> list[record.Row]:
    """One row per load, repetition and variant; the order of the variants rotates."""
    rows: list[record.Row] = []
    for load in preset.loads:
        for repetition in range(preset.repetitions):
            of_pair: dict[str, record.Row] = {}
            for i in range(len(VARIANTS)):
                variant = VARIANTS[(i + repetition) % len(VARIANTS)]
                engine = april if variant in ATTACHED else stock
                row = await Agents(engine, variant, load, checkpoints, seed=repetition).run()
                given = {"bench": "agents turns", "preset": preset.name, **asdict(load), "variant": variant}
                of_pair[variant] = {**common, **given, "repetition": repetition, **row}
            for row in of_pair.values():
                row["ratio"] = row["trajectories_per_s"] / of_pair["resend"]["trajectories_per_s"]
            rows += of_pair.values()
    return rows


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.agents", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=tuple(PRESETS), default="cpu", help="sizes and pace (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a short run, as a test; its rates are not measurements")
    parser.add_argument("--base-only", action="store_true", help="measure only the first load of the preset")
    parser.add_argument(
        "--push-every", type=float, metavar="S", help="only the first load, with a push S seconds after the last one"
    )
    parser.add_argument("--repetitions", type=int, help="repetitions of each load (the preset's)")
    parser.add_argument(
        "--out", type=Path, default=record.RESULTS / "agents.json", help="file to which rows are appended (%(default)s)"
    )
    return parser.parse_args(given)


def chosen_loads(preset: AgentsPreset, *, base_only: bool, push_s: float | None) -> tuple[Load, ...]:
    """The loads that the options select."""
    if push_s is not None:
        return (replace(preset.loads[0], push_s=push_s),)
    return preset.loads[:1] if base_only else preset.loads


def main(given: list[str] | None = None) -> int:
    """Append rows as they are measured; returns the exit status."""
    args = arguments(given)
    preset = PRESETS["smoke" if args.smoke else args.preset]
    with tempfile.TemporaryDirectory(prefix="april-bench-") as folder:
        checkpoints = two_policies(Path(folder), preset.shape)
        pool = preset.slots * preset.context // 2
        size = Size(checkpoints[0], preset.slots, preset.context, pool, pace=preset.pace)
        common = {"run_id": uuid.uuid4().hex[:12], **record.provenance()}
        repetitions = args.repetitions or preset.repetitions
        with both_servers(size, record.ROOT / "out" / "bench") as urls:
            for load in chosen_loads(preset, base_only=args.base_only, push_s=args.push_every):
                part = replace(preset, loads=(load,), repetitions=repetitions)
                _keep(args.out, asyncio.run(_turns(urls, part, checkpoints, common)))
    return 0


async def _turns(
    urls: tuple[str, str], preset: AgentsPreset, checkpoints: tuple[Path, Path], common: record.Row
) -> list[record.Row]:
    async with EngineClient(urls[0], patched=False) as stock, EngineClient(urls[1], patched=True) as april:
        return await measure_turns(stock, april, preset, checkpoints, common)


def _keep(path: Path, rows: list[record.Row]) -> None:
    record.append_rows(path, rows)
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key not in ("machine", "versions")}), flush=True)


if __name__ == "__main__":
    interrupt.run(main, "rows that were measured are kept; the same command measures again")
