"""What a user got wrong, or a machine cannot do, is told in one sentence with its place, never as a traceback."""

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
    """`april-train` with a model and data that are there, and these flags: its status and what it said."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "good.jsonl").write_text('{"input": "q", "label": "a"}\n')
    (tmp_path / "bad.jsonl").write_text('{"input": "q", "label": "a"}\n{"input": "q" "label": "a"}\n')

    def command(*flags: str) -> tuple[int, list[str]]:
        base = ["--hf-checkpoint=model", "--prompt-data=good.jsonl", "--save=run", "--server=http://127.0.0.1:9"]
        status = main([*base, *flags])
        return status, capsys.readouterr().err.splitlines()

    return command


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt-data=bad.jsonl"], "prompt_data: bad.jsonl, line 2: Expecting ',' delimiter"),
        (["--prompt-data=none.jsonl"], "prompt_data: none.jsonl does not exist"),
        (["--hf-checkpoint=nowhere"], "hf_checkpoint: nowhere holds no config.json"),
        (["--save=good.jsonl/run"], "Not a directory: 'good.jsonl/run"),
        (["--hf-checkpoint=model"], "model_type '' is not one of"),
        ([f"--reward={HERE / 'reward_functions.py'}:lenght"], "no attribute 'lenght'"),
        ([f"--group-reward={HERE / 'none.py'}:length"], "group_reward: "),
    ],
)
def test_what_a_run_cannot_begin_with(run: Run, flags: list[str], said: str) -> None:
    status, told = run(*flags)
    assert status == 2
    assert len(told) == 1
    assert told[0].startswith("april-train: ")
    assert said in told[0]


class Ends:
    """A loop that ends with an error, after the checkpoint of step 4."""

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
        (RunError("2 groups short after 10 rounds: none fit to train on. no opinion"), 1),
        (AprilError(410, "round_id", "the reply is no longer kept"), 1),
        (OSError(28, "No space left on device", "run/steps.jsonl"), 1),
        (ConfigError("prompt_data: row 3 has no 'input'; it has prompt"), 2),
        (UnsupportedModelError("a fault of ours"), None),
    ],
)
def test_what_ends_a_run_later(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int | None) -> None:
    monkeypatch.setattr(Ends, "error", error, raising=False)
    monkeypatch.setattr("trainer_bridge.loop.TrainingLoop", Ends)
    if status is None:
        with pytest.raises(type(error)):
            run()
        return
    goes_on = ". The same command goes on after step 4." if status == 1 else ""
    assert run() == (status, [f"april-train: {error}{goes_on}"])
