"""Rollouts of agents on an engine in memory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.fake_agents import FakeAgentEngine, FakeRunner, Outcome
from trainer_bridge import agent_rollout
from trainer_bridge.agent_rollout import AgentRollouts
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.prompt_pool import PromptPool


@pytest.fixture
def agent_engine() -> FakeAgentEngine:
    return FakeAgentEngine()


@pytest.fixture
def make_agents(
    agent_engine: FakeAgentEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Makes `AgentRollouts` whose agents end as `outcome` says; `warnings` has what they log."""
    monkeypatch.setattr(agent_rollout, "AgentRunner", FakeRunner)
    made: list[AgentRollouts] = []

    def rollouts(outcome: Outcome, **fields: Any) -> AgentRollouts:
        FakeRunner.outcome = staticmethod(outcome)  # type: ignore[assignment]
        base = {"hf_checkpoint": "m", "prompt_data": "d", "agent": "m:f", "rollout_batch_size": 2}
        config = Config.from_fields({**base, "n_samples_per_prompt": 2, "over_sampling_batch_size": 3, **fields})
        pool = PromptPool(PromptData([{"input": f"q{i}", "label": None} for i in range(64)], config))
        store = Checkpoints(tmp_path, 1)
        made.append(AgentRollouts(agent_engine, "http://e", "r", pool, config, store, warnings.append))  # type: ignore[arg-type]
        return made[-1]

    warnings: list[str] = []
    rollouts.warnings = warnings  # type: ignore[attr-defined]
    yield rollouts
    for each in made:
        each.close()
