"""Real server starts that are refused: each ends with one sentence and no process left (`fail-closed`)."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import tiny_model
from sglang_april.adapter import source_options, versions
from tests.support.starts import IN_ENVIRONMENT, QUOTA, ROOT, SGLANG_LAUNCHER, SMALL, environment
from trainer_bridge.server_process import free_port

APRIL_LAUNCHER = "sglang_april.launch_server"

# name: arguments, environment, and how the one sentence starts
REFUSED_FLAGS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "speculative": (["--speculative-algorithm", "EAGLE"], {}, "--speculative-algorithm EAGLE is not supported"),
    "dp_attention": (["--enable-dp-attention", "--tp-size", "2"], {}, "--enable-dp-attention is not supported"),
    "dp_size": (["--dp-size", "2"], {}, "--dp-size 2 is not supported"),
    "tokenizer_workers": (["--tokenizer-worker-num", "2"], {}, "--tokenizer-worker-num 2 is not supported"),
    "pp_size": (["--pp-size", "2"], {}, "--pp-size 2 is not supported"),
    "disaggregation": (["--disaggregation-mode", "prefill"], {}, "--disaggregation-mode prefill is not supported"),
    "hisparse": (["--enable-hisparse"], {}, "--enable-hisparse is not supported"),
    "streaming_session": (["--enable-streaming-session"], {}, "--enable-streaming-session is not supported"),
    "session_radix_cache": (["--enable-session-radix-cache"], {}, "--enable-session-radix-cache is not supported"),
    "hierarchical_cache": (["--enable-hierarchical-cache"], {}, "--enable-hierarchical-cache is not supported"),
    "lmcache": (["--enable-lmcache"], {}, "--enable-lmcache is not supported"),
    "flexkv": (["--enable-flexkv"], {}, "--enable-flexkv is not supported"),
    "radix_cache_backend": (["--radix-cache-backend", "other"], {}, "--radix-cache-backend other is not supported"),
    "dcp_size": (["--dcp-size", "2", "--tp-size", "2"], {}, "--dcp-size 2 is not supported"),
    "pdmux": (["--enable-pdmux"], {}, "--enable-pdmux is not supported"),
    "dllm": (["--dllm-algorithm", "LowConfidence"], {}, "--dllm-algorithm LowConfidence is not supported"),
    "embedding": (["--is-embedding"], {}, "--is-embedding is not supported"),
    "encoder_only": (["--encoder-only"], {}, "--encoder-only is not supported"),
    "smg_grpc": (["--smg-grpc-mode"], {}, "--smg-grpc-mode is not supported"),
    "grpc": (["--grpc-mode"], {}, "--grpc-mode is not supported"),
    "ray": (["--use-ray"], {}, "--use-ray is not supported"),
    "on_policy_target": (["--rl-on-policy-target", "fsdp"], {}, "--rl-on-policy-target fsdp is not supported"),
    "original_logprob": (
        [],
        {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"},
        "SGLANG_RETURN_ORIGINAL_LOGPROB=True is not supported",
    ),
    "rust_server": ([], {"SGLANG_RUST_SERVER": "true"}, "SGLANG_RUST_SERVER=True is not supported"),
    "waiting_timeout": (
        ["--tp-size", "2"],
        {"SGLANG_REQ_WAITING_TIMEOUT": "5"},
        "SGLANG_REQ_WAITING_TIMEOUT=5.0 is not supported",
    ),
    "running_timeout": (
        ["--tp-size", "2"],
        {"SGLANG_REQ_RUNNING_TIMEOUT": "5"},
        "SGLANG_REQ_RUNNING_TIMEOUT=5.0 is not supported",
    ),
    "wrong_quota": (["--april-quota", "none"], {}, "--april-quota must be a whole number"),
    "unknown_flag": (["--april-qouta", "4"], {}, "--april-qouta is not a flag"),
    "disk_tier": (["--april-disk-dir", "/no/such/folder"], {}, "--april-disk-dir must be a directory"),
    "journal": (["--april-journal", "/no/such/folder/j"], {}, "the journal /no/such/folder/j cannot be used"),
    "journal_sync": (["--april-journal-sync", "never"], {}, "--april-journal-sync must be one of"),
    "concurrency": (["--april-concurrency", "all"], {}, "--april-concurrency must be a whole number"),
}
# What an older release does not have.
if "SGLANG_RUST_SERVER" not in source_options.variables(versions.sglang_root()):
    del REFUSED_FLAGS["rust_server"]
for _name in ("enable_flexkv", "smg_grpc_mode"):
    if _name not in source_options.arguments(versions.sglang_root()):
        del REFUSED_FLAGS[_name.removeprefix("enable_").removesuffix("_mode")]

# What is special about the way of starting: its entry and how the one sentence starts.
REFUSED_WAYS = {
    "april_launcher": "--dp-size 2 is not supported",
    "command": "--dp-size 2 is not supported",
    "engine": "--dp-size 2 is not supported",
    "prebuilt": "--dp-size 2 is not supported",
    "bad_environment": "SGLANG_APRIL must be a JSON object",
    "hidden_by_platform": "SGLANG_PLATFORM=other makes SGLang skip",
    "hidden_by_plugins": "SGLANG_PLUGINS=other does not contain the plugin april",
    "unreviewed_source": "this SGLang 9.9.9 is not supported, only the reviewed sources of 0.0.1: compared with",
    "without_target": "the hook target sglang.srt.managers.scheduler.Scheduler.get_init_info does not exist",
    "sliding_window": "A model with hybrid sliding-window attention is not supported",
    "recurrent": "A model with recurrent (Mamba-like) layers is not supported",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.make(tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="module")
def outcomes(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Outcomes of all refused starts, run one after the other in forks of one process."""
    common = ["--model-path", model, "--port", str(free_port()), *SMALL]
    flags = [
        {"name": name, "entry": "module", "module": SGLANG_LAUNCHER, "argv": [*common, *QUOTA, *argv], "env": env}
        for name, (argv, env, _) in REFUSED_FLAGS.items()
    ]
    starts = [*flags, *ways_to_start(common, model, tmp_path_factory.mktemp("starts"))]
    # The platform is chosen while SGLang is imported, before the forks ask for partial rollouts.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("forked_starts.py"))],
        input=json.dumps(starts),
        env=environment(SGLANG_APRIL_CPU="1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def ways_to_start(common: list[str], model: str, folder: Path) -> list[dict[str, Any]]:
    two_replicas = {"model_path": model, "dp_size": 2}
    module = {"entry": "module", "module": SGLANG_LAUNCHER, "argv": [*common, *QUOTA]}
    metadata = folder / "sglang-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    swa = variant_of(model, folder / "swa", is_hybrid_swa=True)
    recurrent = variant_of(model, folder / "mamba", model_type="falcon_h1", architectures=["FalconH1ForCausalLM"])
    # What SGLang itself asks for before it takes such a model on a CPU.
    for_recurrent = ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
    return [
        {"name": "april_launcher", "entry": "module", "module": APRIL_LAUNCHER, "argv": [*common, "--dp-size", "2"]},
        {"name": "command", "entry": "command", "argv": [*common, *QUOTA, "--dp-size", "2"]},
        {"name": "engine", "entry": "engine", "arguments": two_replicas, "env": IN_ENVIRONMENT},
        {"name": "prebuilt", "entry": "prebuilt", "arguments": two_replicas, "env": IN_ENVIRONMENT},
        {"name": "bad_environment", "entry": "engine", "arguments": {}, "env": {"SGLANG_APRIL": "yes"}},
        {**module, "name": "hidden_by_platform", "module": APRIL_LAUNCHER, "env": {"SGLANG_PLATFORM": "other"}},
        {**module, "name": "hidden_by_plugins", "module": APRIL_LAUNCHER, "env": {"SGLANG_PLUGINS": "other"}},
        {**module, "name": "unreviewed_source", "sys_path": [str(folder)], "entry": "unreviewed_source"},
        {**module, "name": "other_version_string", "sys_path": [str(folder)], "argv": ["--help", *QUOTA]},
        {**module, "name": "without_target", "entry": "without_target"},
        {**module, "name": "sliding_window", "argv": [*QUOTA, "--model-path", swa]},
        {**module, "name": "recurrent", "argv": [*QUOTA, "--model-path", recurrent, *for_recurrent]},
        {**module, "name": "hidden_from_sglang_launcher", "env": {"SGLANG_PLUGINS": "other"}},
        {**module, "name": "help", "argv": ["--help", *QUOTA]},
        {**module, "name": "april_help", "module": APRIL_LAUNCHER, "argv": ["--help"]},
        {"name": "inactive", "entry": "inactive", "env": {"SGLANG_APRIL": ""}},
    ]


def variant_of(model: str, path: Path, **changes: Any) -> str:
    """A copy of a model's folder with another config."""
    shutil.copytree(model, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return str(path)


@pytest.mark.parametrize("name", REFUSED_FLAGS)
def test_refused_flag_ends_the_start(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert_refused(outcomes[name], REFUSED_FLAGS[name][2])


@pytest.mark.parametrize("name", REFUSED_WAYS)
def test_every_way_of_starting_fails_closed(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert_refused(outcomes[name], REFUSED_WAYS[name])


def test_sglang_refuses_april_flags_without_the_plugin(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["hidden_from_sglang_launcher"]["code"] == 2
    assert "unrecognized arguments: --april-quota 4" in outcomes["hidden_from_sglang_launcher"]["stderr"]


@pytest.mark.parametrize("name", ["help", "april_help", "other_version_string"])
def test_help_lists_april_flags(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes[name]["code"] == 0
    assert all(flag in outcomes[name]["stderr"] for flag in ("--april-quota ", "--april-kv ", "--tp-size "))


def test_inactive_plugin_registers_nothing(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["inactive"]["code"] == 17, outcomes["inactive"]["stderr"]


def test_changed_hook_target_ends_the_start(model: str, tmp_path: Path) -> None:
    """In a copy of SGLang, one hooked method has another body."""
    installed = versions.sglang_root() / "sglang"
    shutil.copytree(installed, tmp_path / "sglang", copy_function=os.symlink, ignore=shutil.ignore_patterns("*.pyc"))
    file = tmp_path / "sglang/srt/managers/scheduler.py"
    text = file.read_text()
    (line,) = [
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == "flush_cache"
    ]
    lines = text.splitlines(keepends=True)
    file.unlink()
    file.write_text("".join([*lines[: line - 1], "        changed = True\n", *lines[line - 1 :]]))
    command = [sys.executable, "-m", SGLANG_LAUNCHER, "--model-path", model, *QUOTA]
    done = subprocess.run(
        command, env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1
    reviewed = versions.installed()["sglang"]
    sentence = "the body of sglang.srt.managers.scheduler.Scheduler.flush_cache has changed"
    assert f"compared with {reviewed}, {sentence}\n" in done.stderr


def assert_refused(outcome: dict[str, Any], sentence: str) -> None:
    reported = [line for line in outcome["stderr"].splitlines() if line.startswith("sglang-april: ")]
    assert outcome["code"] == 1, outcome["stderr"][-2000:]
    assert len(reported) == 1, reported
    assert reported[0].startswith(f"sglang-april: {sentence}")
    assert "Traceback" not in outcome["stderr"].split(reported[0])[1]
    assert not outcome["left_behind"]
