"""The sixty lines of docs/bring-your-own-trainer.md train on a live server."""

from collections.abc import Callable
from pathlib import Path

from examples import own_trainer
from tests.support.live import LiveServer


def test_sixty_lines_take_three_steps(normal: LiveServer, models: Callable[[str, int], Path]) -> None:
    assert len(Path(own_trainer.__file__).read_text().splitlines()) <= 60
    before = normal.server.state()["policy_version"]
    means = own_trainer.train(normal.server.url, str(models("qwen3", 0)), steps=3)
    assert len(means) == 3
    assert all(0 <= mean <= 1 for mean in means)
    state = normal.server.state()
    assert state["policy_version"] == before + 3
    left = [run["groups"] for name, run in state["runs"].items() if name.startswith("own-")]
    assert left
    assert not any(left), "nothing is left behind"
