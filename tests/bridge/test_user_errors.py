"""Errors of the user or the machine are reported in one line with their location, not as a traceback."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_april.client import AprilError
from trainer_bridge.checkpoints import Checkpoints, LoopState
from trainer_bridge.cli import main
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.megatron.shapes import UnsupportedModelError
from trainer_bridge.validate import RunError

HERE = Path(__file__).parent
Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `april-train` with an existing model, data and these flags; returns exit status and stderr."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "pytorch_model.bin").touch()  # not read by these tests
    (tmp_path / "good.jsonl").write_text('{"input": "q", "label": "a"}\n')
    (tmp_path / "bad.jsonl").write_text('{"input": "q", "label": "a"}\n{"input": "q" "label": "a"}\n')

    def command(*flags: str) -> tuple[int, list[str]]:
        base = ["--hf-checkpoint=model", "--prompt-data=good.jsonl", "--save=run", "--server=http://127.0.0.1:9"]
        status = main([*base, *flags])
        return status, capsys.readouterr().err.splitlines()

    return command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-data=bad.jsonl"], "prompt_data: bad.jsonl, line 2: Expecting ',' delimiter"),
        (["--prompt-data=none.jsonl"], "prompt_data: none.jsonl does not exist"),
        (["--hf-checkpoint=nowhere"], "hf_checkpoint: nowhere contains no config.json"),
        (["--save=good.jsonl/run"], "good.jsonl/run/checkpoints'"),
        (["--hf-checkpoint=model"], "model_type '' is not one of"),
        ([f"--reward={HERE / 'reward_functions.py'}:lenght"], "no attribute 'lenght'"),
        ([f"--group-reward={HERE / 'none.py'}:length"], "group_reward: "),
    ],
)
def test_invalid_input_is_reported_before_the_run(run: Run, flags: list[str], message: str) -> None:
    status, errors = run(*flags)
    assert status == 2
    assert len(errors) == 1
    assert errors[0].startswith("april-train: ")
    assert message in errors[0]


COMMAND = """
import sys
sys.path += [{root!r}, {kernels!r}]
from trainer_bridge.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""The script that pip installs. A checkout is appended to the path, as if it was installed."""


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--reward=my_functions:score", "--dry-run"], 0, "\nreward: my_functions:score\n"),
        (["--group-reward=my_functions:score", "--dry-run"], 0, "\ngroup_reward: my_functions:score\n"),
        (["--agent=my_functions:agent", "--dry-run"], 0, "\nagent: my_functions:agent\n"),
        (["--reward=my_functions:missing"], 2, "module 'my_functions' has no attribute 'missing'"),  # of a worker
    ],
)
def test_functions_of_a_module_in_the_current_folder_are_found(
    tmp_path: Path, flags: list[str], status: int, message: str
) -> None:
    root = HERE.parents[1]
    script, folder = tmp_path / "bin" / "april-train", tmp_path / "here"
    for path in (script.parent, folder):
        path.mkdir()
    script.write_text(COMMAND.format(root=str(root), kernels=str(root / "kernels")))
    functions = "def score(sample, prompt):\n    return 0.0\n\n\nasync def agent(task, client):\n    return 0.0\n"
    (folder / "my_functions.py").write_text(functions)
    (folder / "data.jsonl").write_text('{"input": "q", "label": "a"}\n')
    model = f"--hf-checkpoint={root / 'examples/checkpoints/v0'}"
    command = [sys.executable, str(script), model, "--prompt-data=data.jsonl", "--server=http://127.0.0.1:9", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, message in done.stdout + done.stderr) == (status, True), done.stderr[-2000:]


class LoopThatFails:
    """A loop that fails after the checkpoint of step 4."""

    error: Exception

    def __init__(self, config: Config) -> None:
        self.store = Checkpoints(Path(config.save), 1)

    def run(self) -> None:
        self.store.save(LoopState(step=4), lambda _: None)
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunError("2 groups short after 10 rounds: none can be trained on. no opinion"), 1),
        (AprilError(410, "round_id", "the reply is no longer kept"), 1),
        (OSError(28, "No space left on device", "run/steps.jsonl"), 1),
        (ConfigError("prompt_data: row 3 has no 'input'; it has prompt"), 2),
        (UnsupportedModelError("a bug"), None),
    ],
)
def test_errors_during_the_run_are_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int | None
) -> None:
    monkeypatch.setattr(LoopThatFails, "error", error, raising=False)
    monkeypatch.setattr("trainer_bridge.loop.TrainingLoop", LoopThatFails)
    if status is None:
        with pytest.raises(type(error)):
            run()
        return
    resume = ". The same command resumes after step 4." if status == 1 else ""
    assert run() == (status, [f"april-train: {error}{resume}"])


def test_a_run_has_one_process(run: Run, tmp_path: Path) -> None:
    """A second one would delete the first one's unfinished checkpoint and truncate its rows."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, lines = run()
    assert (status, lines[-1]) == (2, "april-train: save: run is in use by another april-train")
