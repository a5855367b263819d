"""Refusals before SGLang is imported: each is one sentence that names the argument."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tiny_model import make
from sglang_april.launch_checks import damage_of, reason_not_startable


def test_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        reason = reason_not_startable(["--port", str(port), "--tp", "2"])
        assert reason is not None
        assert reason.startswith(f"port {port} of 127.0.0.1 is in use")
        assert reason_not_startable([f"--port={port}", "--help"]) is None
    assert reason_not_startable(["--port", str(port)]) is None
    assert reason_not_startable(["--port", "many"]) is None  # SGLang's own parser reports it


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make(tmp_path / "model")


def test_sound_checkpoints_pass(model: Path) -> None:
    assert damage_of(str(model)) is None
    for elsewhere in ("Qwen/Qwen3-4B", "gpt2", "s3://bucket/models/mine", "redis://host/db/mine"):
        assert damage_of(elsewhere) is None
    assert damage_of(str(model / "model.safetensors")) is None


def test_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    assert damage_of(str(tmp_path / "none")) == f"--model-path {tmp_path / 'none'} does not exist"
    assert damage_of("models/of/mine") == "--model-path models/of/mine does not exist"
    assert damage_of("tests/nowhere") == "--model-path tests/nowhere does not exist"
    assert "has no config.json" in str(damage_of(str(tmp_path)))


def test_damaged_config_is_refused(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "is damaged: JSONDecodeError" in str(damage_of(str(model)))


@pytest.mark.parametrize("content", ["[]", "null", "3", '"text"'])
def test_config_that_is_not_an_object_is_refused(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    assert damage_of(str(model)) == f"--model-path {model} is damaged: its config.json is not a JSON object"


def test_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert f"--model-path {model} has no weights" in str(damage_of(str(model)))
    assert f"--model-path {model} has no weights" in str(reason_not_startable(["--model", str(model), "--port", "0"]))
    dummy = ["--model", str(model), "--load-format", "dummy", "--port", "0"]
    assert reason_not_startable(dummy) is None


def test_folder_without_a_tokenizer_is_refused(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    given = ["--model", str(model), "--port", "0"]
    assert f"--model-path {model} has no tokenizer" in str(reason_not_startable(given))
    assert reason_not_startable([*given, "--tokenizer-path", "elsewhere"]) is None
    assert reason_not_startable([*given, "--skip-tokenizer-init"]) is None


def test_damaged_tokenizer_is_refused(model: Path) -> None:
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text()[:100])
    assert f"{tokenizer} is damaged: JSONDecodeError" in str(reason_not_startable(["--model", str(model), "--port=0"]))


@pytest.mark.parametrize("keep", [4, 100, 0.5, -1])
def test_truncated_weights_are_refused(model: Path, keep: float) -> None:
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    size = int(keep * len(content)) if isinstance(keep, float) else keep
    weights.write_bytes(content[:size])
    assert str(damage_of(str(model))).startswith(f"{weights} is ")


def test_missing_shard_is_refused(model: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-1.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert str(damage_of(str(model))).endswith("model-2.safetensors is missing (1 of 2 files)")


def test_launcher_ends_with_the_sentence_before_it_imports_sglang(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "sglang_april.launch_server", "--model-path", str(tmp_path)]
    done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert lines == [f"sglang-april: --model-path {tmp_path} has no config.json; it must be a Hugging Face folder."]
    assert "sglang.launch_server" not in done.stderr
