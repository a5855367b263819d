"""Processes that rewards start: they are allowed, and none outlives its worker or the trainer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.bridge.test_rewards import HERE, prompt, samples
from tests.support.live import until
from trainer_bridge.rewards import Rewards, Score

PATH = f"{HERE}:uses_processes"


def is_running(pid_file: Path) -> bool:
    pid = int(pid_file.read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def score(pool: Rewards, index: int, folder: Path, label: str = "") -> Score:
    return pool.submit([samples()[index]], prompt(label=label, metadata=str(folder))).result(240)[0]


def test_a_reward_may_use_multiprocessing(tmp_path: Path) -> None:
    pool = Rewards(PATH, 1, 120.0)
    assert score(pool, 0, tmp_path).reward == 6
    assert score(pool, 1, tmp_path).reward == 7
    assert is_running(tmp_path / "1")
    pool.close()
    until(lambda: not is_running(tmp_path / "1"), "the end of a process that the reward has left")


@pytest.mark.parametrize(("label", "problem"), [("hangs", "no reward after 10 s"), ("dies", "process died")])
def test_processes_of_a_reward_end_with_its_worker(tmp_path: Path, label: str, problem: str) -> None:
    """A worker that dies is noticed although its process lives on."""
    pool = Rewards(PATH, 1, 10.0)
    first = tmp_path / "1"
    assert problem in score(pool, 1, tmp_path, label).problem
    until(lambda: not is_running(first), "the end of the reward's process")
    pool.close()


TRAINER = """
import sys
from tests.bridge.test_child_processes import PATH, score
from trainer_bridge.rewards import Rewards

if __name__ == "__main__":
    pool = Rewards(PATH, 1, 600.0)
    score(pool, 1, sys.argv[1], sys.argv[2])
    raise ValueError("the trainer does not close its pool")
"""


@pytest.mark.parametrize("killed", [True, False])
def test_processes_of_a_reward_end_with_the_trainer(tmp_path: Path, killed: bool) -> None:
    """Also while the reward hangs, and if the trainer ends by an error."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    trainer = subprocess.Popen(
        [sys.executable, script, str(tmp_path), "hangs" if killed else "returns"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    pid_file = tmp_path / "1"
    until(lambda: pid_file.exists() and bool(pid_file.read_text()), "the process of the reward")
    if killed:
        trainer.send_signal(signal.SIGKILL)
    assert trainer.wait(120) == (-signal.SIGKILL if killed else 1)
    until(lambda: not is_running(pid_file), "the end of the reward's process")
