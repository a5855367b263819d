"""Training on trajectories of agent functions, end to end on the shared server."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.test_agent_runner import FUNCTIONS
from tests.support.bridge import configuration, sample_keys, train, write_prompts
from tests.support.live import LiveServer

Model = Callable[[str, int], Path]


@pytest.fixture
def config(normal: LiveServer, models: Model, tmp_path: Path) -> Callable[..., Any]:
    def make(name: str = "one", agent: str = "some_turns", **fields: Any) -> Any:
        base = {"agent": f"{FUNCTIONS}:{agent}", "agent_workers": 1, "agent_timeout": 240.0}
        reward = {"reward": "trainer_bridge.rewards:math_answer"}
        return configuration(tmp_path / name, normal.server.url, models("qwen3", 0), **{**reward, **base, **fields})

    return make


def test_agents_train_over_rounds_and_their_drain(
    normal: LiveServer, config: Callable[..., Any], tmp_path: Path
) -> None:
    """Each trajectory is trained on once, also over pushes, and trainer and engine agree on all tokens."""
    held = str(write_prompts(tmp_path / "held.jsonl", 3, 1))
    _, loop, rows = train(config(num_rollout=3, eval_interval=3, eval_prompt_data=held))
    assert [row["drain"] for row in rows[:3]] == [False, False, False]
    assert [row["groups"] for row in rows[:3]] == [4, 4, 4]
    assert all(row["samples"] == 16 and sorted(set(row["turns"])) == [1, 2, 3] for row in rows[:3])
    delivered = [tuple(key) for row in rows for key in row["delivered"]]
    assert len(set(delivered)) == len(delivered)
    samples = [sample for part in loop.trained for sample in part]
    assert set(sample_keys(samples)) == set(delivered)
    longest = Counter(key for sample in samples for key in sample_keys([sample]) * sample.turns)
    assert max(longest.values()) == 3
    extended = [sample for sample in samples if sample.index == 2]
    assert {sample.turns for sample in extended} == {3}
    # Two tokens from outside between two turns.
    assert {int((~sample.loss_mask).sum()) for sample in extended} == {4}
    assert rows[1]["off_policy_share"] > 0, "trajectories were carried over the push"
    for report in loop.reports:
        assert report.applied
        assert report.stats.row()["on_policy_gap"] < 1e-4
    state = normal.server.state()
    assert state["samples"]["running"] == state["samples"]["suspended"] == 0


def test_a_failed_trajectory_is_repeated(normal: LiveServer, config: Callable[..., Any]) -> None:
    fields = {"over_sampling_batch_size": 4, "partial_rollout": False, "on_end": "drop"}
    _, _, rows = train(config(agent="fails_once", num_rollout=1, **fields))
    assert [row["groups"] for row in rows] == [4]
    assert Counter(index for _, index in rows[0]["delivered"]) == {0: 4, 1: 4, 2: 4, 3: 4}
    assert len(rows[0]["problems"]) == 3
    assert "is rejected, and repeated: KeyError('no such tool')" in rows[0]["problems"][0]
    assert rows[0]["off_policy_share"] == 0.0
