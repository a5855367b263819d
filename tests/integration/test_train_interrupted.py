"""Ctrl-C of `april-train`: one line that says what is kept, exit status 130, no process left, a clean resumption."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bridge.test_agent_runner import FUNCTIONS
from tests.integration.conftest import NORMAL
from tests.support.bridge import configuration
from tests.support.live import LiveServer, until
from tests.support.server import COMMON, ROOT
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.progress import read_rows

Model = Callable[[str, int], Path]
MARK = "APRIL_TEST_COMMAND"
STEP = re.compile(r"^(step|drain) +(\d+) .* (\S+) tok/s", re.MULTILINE)
SLOW_S = 0.05
"""Seconds of a forward, so that a run of some steps does not end before its interruption."""
SLOW_START_S = 3.0
"""The same, so that a round does not end before the next trainer has started."""


@dataclass
class Command:
    """`april-train` in a process group of its own, as a shell starts it. All its processes have `mark` in their
    environment, also those in other groups."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    mark: str
    save: Path = field(init=False)

    def __post_init__(self) -> None:
        self.save = self.folder / "run"

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def errors(self) -> list[str]:
        return [line for line in (self.folder / "err").read_text().splitlines() if line]

    def processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                pass
        return found

    def interrupt(self) -> None:
        """Ctrl-C, and everything that must hold after it."""
        assert self.process.poll() is None, (self.output[-2000:], self.errors[-20:])
        os.killpg(self.process.pid, signal.SIGINT)
        assert self.process.wait(120) == 130, self.errors
        until(lambda: not self.processes(), "all processes have ended")
        steps = Checkpoints(self.save, 2).steps()
        kept = f"The same command resumes after step {steps[-1]}." if steps else "No step was saved; the same command"
        (line,) = self.errors  # not one warning of a library either
        assert line.startswith(f"april-train: interrupted. {kept}")


@pytest.fixture
def start(models: Model, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `april-train` on an external server, or without one; the same folder and fields are the same command."""
    started: list[Command] = []

    def make(url: str | None, **fields: Any) -> Command:
        config = configuration(tmp_path, url or "", models("qwen3", 0), **{**fields, "server": url})
        (tmp_path / "config.yaml").write_text(config.as_yaml())
        mark = uuid.uuid4().hex
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer_bridge", "--config", str(tmp_path / "config.yaml")],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        started.append(Command(tmp_path, process, mark))
        return started[-1]

    yield make
    for command in started:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()


def steps(command: Command) -> list[tuple[str, str, str]]:
    """Name, number and tokens/s of the steps on the console."""
    return STEP.findall(command.output)


def test_ctrl_c_while_the_server_starts(start: Callable[..., Command]) -> None:
    command = start(None, server_flags=[*COMMON, *NORMAL])
    log = command.save / "server.log"
    until(lambda: "starting a server" in command.output and log.exists() and log.stat().st_size, "the server starts")
    assert any("launch_server" in line for line in command.processes())
    command.interrupt()


def test_ctrl_c_in_a_round_and_the_same_command_again(normal: LiveServer, start: Callable[..., Command]) -> None:
    """The step after the resumption, whose tokens were drawn in part before, has no tokens/s; the last is the drain."""
    fields = {"num_rollout": 5, "save_interval": 1}
    with normal.server.slowed(SLOW_S):
        command = start(normal.server.url, **fields)
        until(lambda: len(steps(command)) == 2, "two steps")
        until(lambda: normal.running() > 0, "the next round")
        command.interrupt()
    done = Checkpoints(command.save, 2).steps()[-1]
    again = start(normal.server.url, **fields)
    assert again.process.wait(300) == 0, again.errors
    assert f"resuming after step {done}\n" in again.output
    printed = steps(again)
    assert [(name, int(number)) for name, number, _ in printed] == [
        *(("step", number) for number in range(done + 1, 6)),
        ("drain", 6),
    ]
    assert [rate == "–" for _, _, rate in printed] == [True] + [False] * (len(printed) - 1)
    rows = read_rows(again.save / "steps.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    delivered = [tuple(sample) for row in rows for sample in row["delivered"]]
    assert len(delivered) == len(set(delivered))


def test_ctrl_c_in_a_round_of_a_colocated_run(normal: LiveServer, start: Callable[..., Command]) -> None:
    """The steps since the last checkpoint are repeated, and release memory, beside the round that is still open."""
    fields = {"num_rollout": 4, "save_interval": 20, "colocate": True}
    with normal.server.slowed(SLOW_S):
        command = start(normal.server.url, **fields)
        until(lambda: len(steps(command)) == 2, "two steps")
        with normal.server.slowed(SLOW_START_S):
            until(lambda: normal.running() > 0, "the next round")
            command.interrupt()
            again = start(normal.server.url, **fields)
            until(lambda: steps(again) or again.process.poll() is not None, "the first step is repeated")
    assert again.process.wait(300) == 0, again.errors
    rows = read_rows(again.save / "steps.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    delivered = [tuple(sample) for row in rows for sample in row["delivered"]]
    assert len(delivered) == len(set(delivered))


def test_ctrl_c_while_agents_run(normal: LiveServer, start: Callable[..., Command]) -> None:
    agents = {"agent": f"{FUNCTIONS}:some_turns", "agent_workers": 2, "reward": "trainer_bridge.rewards:math_answer"}
    with normal.server.slowed(SLOW_S):
        command = start(normal.server.url, num_rollout=20, **agents)
        until(lambda: len(steps(command)) == 1, "a step")
        assert sum("spawn_main" in line for line in command.processes()) >= 2
        command.interrupt()
