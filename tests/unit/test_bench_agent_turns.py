"""bench.agents: the agents of a row, on an engine in memory."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.agent_turns import Agents, Load, Variant
from bench.rollout.engine_client import Counters, EngineError

LOAD = Load(agents=3, trajectories=6, turns=2, prompt=4, response=8, tool_tokens=2, tool_s=0.0, push_s=0.03)
CHECKPOINTS = (Path("v0"), Path("v1"))


class AgentsEngine:
    """An engine whose requests take `step_s` unless they are aborted, and which fails in the calls of `failing`."""

    def __init__(self, step_s: float = 0.02, failing: str = "") -> None:
        self.step_s, self.failing = step_s, failing
        self.running = 0
        self.prompts: list[tuple[int, ...]] = []
        self.lengths: list[int] = []
        self.pauses: list[int] = []
        """Requests that each pause found."""
        self._aborted = asyncio.Event()

    async def post(self, route: str, body: dict[str, Any], _headers: dict[str, str] | None = None) -> Any:
        self._fail(route)
        if route == "/pause_generation":
            self.pauses.append(self.running)
        if route != "/generate":
            return {}
        length = body["sampling_params"]["max_new_tokens"]
        self.prompts.append(tuple(body["input_ids"]))
        self.lengths.append(length)
        aborted, self.running = self._aborted, self.running + 1
        try:
            await asyncio.wait_for(aborted.wait(), self.step_s)
            drawn, reason = length // 2, "abort"
        except TimeoutError:
            drawn, reason = length, "length"
        finally:
            self.running -= 1
        return {"output_ids": [7] * drawn, "meta_info": {"finish_reason": {"type": reason}}}

    def _fail(self, route: str) -> None:
        if route == self.failing:
            raise EngineError(f"POST {route}", 400, b"refused")

    async def get(self, _route: str) -> Any:
        return {"push_open": False}

    async def load_weights(self, _checkpoint: Path, *, flush: bool) -> None:
        self._fail("weights")

    async def abort_all(self) -> None:
        self._aborted.set()
        self._aborted = asyncio.Event()

    async def flush(self) -> None:
        pass

    async def settled(self) -> Counters:
        return Counters(0, 0, 0, 0, 0, 0)


async def run(engine: AgentsEngine, variant: Variant, load: Load = LOAD) -> dict[str, Any]:
    agents = Agents(engine, variant, load, CHECKPOINTS, seed=1)  # type: ignore[arg-type]
    return await asyncio.wait_for(agents.run(), 20)


def test_before_an_aborting_pause_every_request_has_answered() -> None:
    async def scene() -> tuple[AgentsEngine, dict[str, Any]]:
        engine = AgentsEngine()
        return engine, await run(engine, "resend")

    engine, row = asyncio.run(scene())
    assert engine.pauses
    assert not any(engine.pauses)
    assert row["resent_requests"]


def test_every_variant_has_the_same_load() -> None:
    """Prompts and lengths do not depend on which agent is faster."""

    async def scene(step_s: float, agents: int) -> AgentsEngine:
        engine = AgentsEngine(step_s)
        await run(engine, "in_place", replace(LOAD, agents=agents, push_s=0.0))
        return engine

    one, other = asyncio.run(scene(0.0, 1)), asyncio.run(scene(0.002, 3))
    assert sorted(one.prompts) == sorted(other.prompts)
    assert sorted(one.lengths) == sorted(other.lengths)
    assert len(set(one.prompts)) == LOAD.trajectories * LOAD.turns


@pytest.mark.parametrize(
    ("variant", "failing"),
    [("attached", "/april/push/begin"), ("in_place", "weights"), ("resend", "/pause_generation")],
)
def test_a_push_that_fails_ends_the_run(variant: Variant, failing: str) -> None:
    """Agents that wait for the end of that push would wait for ever."""
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(run(AgentsEngine(failing=failing), variant))
    assert raised.group_contains(EngineError)
