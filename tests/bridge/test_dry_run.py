"""What `april-train --dry-run` checks and reports."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import make
from trainer_bridge.cli import main

AGENT = """
async def good(task, client):
    return 1.0

def plain(task, client):
    return 1.0
"""


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the default flags of `dry_run_flags` name; it is the working directory."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return tmp_path


def dry_run_flags(*flags: str) -> list[str]:
    return ["--hf-checkpoint", "model", "--prompt-data", "data.jsonl", "--save", "run", "--dry-run", *flags]


def test_dry_run_checks_model_data_and_reward(complete: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(dry_run_flags()) == 0
    output = capsys.readouterr().out
    assert "prompt_data: 1 rows (data.jsonl); the first: '1+1=', label '2'" in output
    assert "reward: trainer_bridge.rewards:math_answer" in output
    assert "over_sampling_batch_size: null" in output
    assert re.search(r"memory of a trainer rank, estimated: [0-9.]+ GB \(weights .*; more without recompute", output)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hf-checkpoint", "nowhere"], "hf_checkpoint: nowhere contains no config.json"),
        (["--prompt-data", "nothing.jsonl"], "prompt_data: nothing.jsonl does not exist"),
        (["--label-key", "answer"], "prompt_data: row 0 has no 'answer'"),
        (["--eval-prompt-data", "nothing.jsonl"], "eval_prompt_data: nothing.jsonl does not exist"),
        (["--reward", "mine"], "reward: must be module:function"),
        (["--reward", "trainer_bridge.rewards:missing"], "reward: trainer_bridge.rewards:missing: AttributeError"),
        (["--group-reward", "no_such_module:f"], "group_reward: no_such_module:f: ModuleNotFoundError"),
        (["--tensor-model-parallel-size", "64", "--trainer-processes", "64"], "does not divide"),
        (["--save", "data.jsonl/run"], "save: "),
    ],
)
def test_dry_run_fails_for_what_is_missing(
    complete: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(dry_run_flags(*flags)) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").write_text("[]"), "its config.json is not a JSON object"),
        (lambda model: (model / "config.json").write_text('{"model_type": "qwen3"}'), "has no num_hidden_layers"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
        (lambda model: [path.unlink() for path in model.glob("tokenizer*")], "has no tokenizer"),
        (lambda model: (model / "model.safetensors").rename(model / "model.bin"), "has no *.safetensors"),
        (lambda model: os.truncate(model / "model.safetensors", 5000), "is truncated: 5,000 of"),
    ],
)
def test_dry_run_refuses_a_damaged_model(
    complete: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], message: str
) -> None:
    damage(complete / "model")
    assert main(dry_run_flags()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("april-train: hf_checkpoint: ")
    assert message in line


def test_dry_run_loads_the_agent(complete: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (complete / "agents.py").write_text(AGENT)
    assert main(dry_run_flags("--agent", "agents.py:good")) == 0
    output = capsys.readouterr().out
    assert "agent: agents.py:good" in output
    assert "trajectories" in output
    for agent, message in (("plain", "is not an async function"), ("gone", "AttributeError")):
        assert main(dry_run_flags("--agent", f"agents.py:{agent}")) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"april-train: agent: agents.py:{agent}")
        assert message in line


def test_dry_run_reports_all_problems_at_once(complete: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(dry_run_flags("--hf-checkpoint", "nowhere", "--reward", "mine")) == 2
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == ["hf_checkpoint", "reward"]
