"""How `april-train` ends: a failure and an interruption report what is kept and what to do next."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.live import until
from trainer_bridge.checkpoints import Checkpoints, LoopState
from trainer_bridge.cli import main
from trainer_bridge.config import Config
from trainer_bridge.server_process import EngineGoneError, ServerStartError

INTERRUPTED = """
import sys
from pathlib import Path
from trainer_bridge import __main__, loop
from trainer_bridge.rollout_engine import RolloutEngine, RolloutEngines

class WaitingLoop:
    def __init__(self, config):
        folder = Path(config.save)
        RolloutEngine._command = lambda self: [sys.executable, "-c", "import time; time.sleep(600)"]
        self.engines = RolloutEngines(config, folder, note=lambda _: None)
    def interrupt(self):
        pass
    def run(self):
        self.engines.wait_until_ready()

loop.TrainingLoop = WaitingLoop
sys.argv = ["april-train", "--hf-checkpoint=m", "--prompt-data=d", "--save={save}"]
sys.exit(__main__.main())
"""


def test_failed_run_reports_the_reason_and_where_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FailingLoop:
        def __init__(self, _: Config) -> None:
            self.store = Checkpoints(tmp_path, 1)

        def run(self) -> None:
            self.store.save(LoopState(step=4), lambda _: None)
            raise EngineGoneError("no server at http://x became ready within 9 s")

        def close(self) -> None:
            (tmp_path / "closed").touch()

    monkeypatch.setattr("trainer_bridge.loop.TrainingLoop", FailingLoop)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["--hf-checkpoint", "m", "--prompt-data", "d"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors == [
        "april-train: no server at http://x became ready within 9 s. The same command resumes after step 4."
    ]
    assert (tmp_path / "closed").exists()


def test_refused_server_flag_is_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command would only fail again."""

    class RefusedLoop:
        def __init__(self, _: Config) -> None:
            self.store = Checkpoints(tmp_path, 1)

        def run(self) -> None:
            raise ServerStartError("the server did not start: sglang-april: --pp-size 2 is not supported (log: x)")

        def close(self) -> None:
            pass

    monkeypatch.setattr("trainer_bridge.loop.TrainingLoop", RefusedLoop)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["--hf-checkpoint", "m", "--prompt-data", "d"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("(log: x). After a correction, for example of server_flags, run the command again.")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_stops_its_server_and_reports_what_is_kept(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "run").mkdir()
    code = INTERRUPTED.format(save=str(tmp_path / "run"))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=Path.cwd())
    until(lambda: (tmp_path / "run" / "server.json").exists(), "the start of the server")
    server = int(json.loads((tmp_path / "run" / "server.json").read_text())["pid"])
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 128 + number
    assert errors == ["april-train: interrupted. No step was saved; the same command starts from the beginning."]
    assert not psutil.pid_exists(server)


INTERRUPTED_SAVE = """
import io, signal, sys
import torch
from types import SimpleNamespace
from pathlib import Path
from trainer_bridge import __main__, loop
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.validate import RunError

class Interrupting(io.BytesIO):
    writes = 0
    def write(self, data):
        self.writes += 1
        if self.writes == 3:
            signal.raise_signal(signal.SIGINT)
        return super().write(data)

class SavingLoop:
    def __init__(self, config):
        self.engines = SimpleNamespace(end_servers=lambda: None)
        self.store = Checkpoints(Path(config.save), 1)
    def interrupt(self):
        pass
    def run(self):
        try:
            torch.save({"weights": torch.zeros(100000)}, Interrupting())
        except RuntimeError as error:
            raise RunError("step-000001 cannot be written") from error

loop.TrainingLoop = SavingLoop
sys.argv = ["april-train", "--hf-checkpoint=m", "--prompt-data=d", "--save=SAVE"]
sys.exit(__main__.main())
"""


def test_interruption_while_a_checkpoint_is_written_is_no_failure_of_its_disk(tmp_path: Path) -> None:
    """An exception of a signal handler in `torch.save` comes out of it as a RuntimeError."""
    code = INTERRUPTED_SAVE.replace('SAVE"', f'{tmp_path / "run"}"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd(), check=False)
    assert done.returncode == 130, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("april-train: interrupted. No step was saved")
