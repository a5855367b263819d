"""The trajectories of one run, without a round."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.bridge.fake_agents import FakeRunner
from trainer_bridge.agent_trajectories import AgentTrajectories
from trainer_bridge.agents import AgentFinished
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.validate import RunError


def test_the_death_of_a_process_with_many_agents_repeats_them() -> None:
    """Half of 64 agents end together; only repeats that fail as well may end the run."""
    fake: Any = FakeRunner(print)
    client: Any = SimpleNamespace(done=lambda *_, **__: None)
    FakeRunner.outcome = staticmethod(lambda _: None)  # type: ignore[assignment]
    made = AgentTrajectories(
        client, fake, "r", 8, {"seed": 1}, whole_groups=True, accept=bool, replace=print, warn=lambda _: None
    )
    config = Config(hf_checkpoint="m", prompt_data="d", n_samples_per_prompt=8)
    for prompt in PromptData([{"input": f"q{i}", "label": None} for i in range(8)], config).take(8):
        made.start(prompt)
    first = [start.id for start in fake.started]

    def die(names: list[str]) -> None:
        for name in names:
            made.finished(AgentFinished(name, None, "the agent process died"))

    die(first[:48])
    assert len(fake.started) == 64 + 48
    with pytest.raises(RunError, match="in a row failed, the last one: the agent process died"):
        die([*first[48:], *(start.id for start in fake.started[64:])])
