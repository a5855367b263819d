"""Kills -9 of a process that drives ledger, journal and page store without a model.

`APRIL_LONG=1` makes a thousand.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.crash_client import CrashClient
from tests.unit.crash_loop import one_epoch

pytestmark = pytest.mark.slow

KILLS = 1000 if "APRIL_LONG" in os.environ else 200
ROOT = Path(__file__).resolve().parents[2]


def test_nothing_is_lost_over_kills(tmp_path: Path) -> None:
    """The parent that forks is a process of its own, without the threads that a test run has."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.unit.test_kill_process", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-8000:]


def kills(tmp_path: Path) -> None:
    """Kill moments are counted in messages of the killed process, not in time."""
    client, rng = CrashClient(), random.Random(7)
    words = whole = halves = 0
    for epoch in range(KILLS):
        words += one_epoch(tmp_path, client, epoch, rng.randint(2, 40))
        whole += len(list(tmp_path.glob("*.kv")))
        halves += len(list(tmp_path.glob("*.part")))
    one_epoch(tmp_path, client, KILLS, None)
    assert client.restored == KILLS + 1
    assert not list(client.undelivered())
    assert not client.open
    print(f"{KILLS} kills, {words} words, {len(client.replies)} replies, {len(client.delivered)} samples delivered")
    recovered = len((tmp_path / "recovered").read_text().splitlines())
    print(f"{whole} files of pages outlived a process, {halves} were killed half written, {recovered} resumed from")
    # An epoch is paced by its messages, so these counts do not depend on the speed of the machine or its disk.
    assert len(client.replies) > KILLS
    assert len(client.delivered) > 2 * KILLS
    assert recovered
    assert whole > KILLS // 100


if __name__ == "__main__":
    kills(Path(sys.argv[1]))
