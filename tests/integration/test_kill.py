"""S8 on the live server: kill -9 at random moments, and a restart with the same journal."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import NORMAL, Pool
from tests.support.kills import Story
from tests.support.server import Server

KILLS = 3


@pytest.fixture
def journalled(pool: Pool, tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own: nobody else may have it killed."""
    server = pool.get("journal", [*NORMAL, f"--april-journal={tmp_path / 'journal'}"])
    yield server
    server.stop()


def test_killed_at_any_moment_nothing_is_lost_and_nothing_comes_twice(
    journalled: Server, models: Callable[[str, int], Path]
) -> None:
    story = Story(journalled, lambda seed: models("qwen3", seed), seed=1)
    story.tell(KILLS)
    assert story.kills == KILLS
    assert story.replayed
    assert story.warnings == 0
    print(f"{story.kills} kills, {sum(map(len, story.rounds.values()))} rounds, {len(story.groups)} groups delivered")
