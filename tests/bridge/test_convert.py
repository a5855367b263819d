"""`april-convert`: the folders that it takes, and the model that it writes."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.tiny_model import make
from trainer_bridge.megatron.convert import main
from trainer_bridge.megatron.worker_group import make_trainer
from trainer_bridge.trainer import TrainerSettings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the checkpoints of two steps; the trainer's files are those of `model`."""
    folder = tmp_path_factory.mktemp("run")
    model = make(folder / "model", dtype="float32")
    trainer = make_trainer(TrainerSettings(hf_checkpoint=model, dtype="float32", device="cpu"))
    for step in (3, 12):
        files = folder / "checkpoints" / f"step-{step:06d}" / "trainer"
        files.mkdir(parents=True)
        trainer.save(files)
    trainer.close()
    return folder


def converted(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["april-convert", *map(str, arguments)])
    return main()


@pytest.mark.parametrize(
    ("given", "step"), [("", 12), ("checkpoints/step-000003", 3), ("checkpoints/step-000003/trainer", 3)]
)
def test_run_step_or_trainer_folder_is_converted(
    run: Path, given: str, step: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted(monkeypatch, run / given) == 0
    folder = run / "checkpoints" / f"step-{step:06d}" / "hf"
    assert capsys.readouterr().out.endswith(f"as a Hugging Face model: {folder}\n")
    written = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(run / "model").state_dict().items():
        assert torch.equal(written[name], value), name


def test_output_folder_may_be_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert converted(monkeypatch, run, tmp_path / "out") == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_folder_without_a_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted(monkeypatch, tmp_path) == 2
    assert "has no checkpoint: it must be the folder of a run" in capsys.readouterr().err


def test_missing_source_model_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted(monkeypatch, run, "--hf-checkpoint", tmp_path) == 2
    assert "name the initial checkpoint with --hf-checkpoint" in capsys.readouterr().err
