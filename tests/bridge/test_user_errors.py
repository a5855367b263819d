"""Errors of the user or the machine are reported in one line with their location, not as a traceback."""

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
