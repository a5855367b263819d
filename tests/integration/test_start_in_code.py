"""Servers that code or SGLang's own launcher starts: all hooks are active, or none where the model is another one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples import tiny_model
from sglang_april.adapter import versions
from tests.support.starts import (
    IN_ENVIRONMENT,
    QUOTA,
    ROOT,
    SGLANG_LAUNCHER,
    SMALL,
    START_TIMEOUT_S,
    environment,
    serving,
)
from trainer_bridge.server_process import free_port


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.make(tmp_path_factory.mktemp("model") / "qwen3"))


IN_CODE = """
import multiprocessing, sys
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    # As slime and verl do: the arguments are objects, and the server is a child that never sees a command line.
    args = ServerArgs(model_path=sys.argv[1], port=int(sys.argv[2]), mem_fraction_static=0.6, max_total_tokens=4096)
    child = multiprocessing.get_context("spawn").Process(target=launch_server, args=(args,))
    child.start()
    child.join()
"""


@pytest.fixture(params=["SGLang's launcher with --april-quota", "launch_server(ServerArgs) in a spawned process"])
def sglang_server(request: pytest.FixtureRequest, model: str, tmp_path: Path) -> Iterator[str]:
    """A server started without sglang-april's launcher."""
    port = str(free_port())
    if request.param.startswith("SGLang"):
        command, extra = ["-m", SGLANG_LAUNCHER, "--model-path", model, "--port", port, *SMALL, *QUOTA], {}
    else:
        (tmp_path / "script.py").write_text(IN_CODE)
        command, extra = [str(tmp_path / "script.py"), model, port], IN_ENVIRONMENT
    with serving(command, port, tmp_path / "log", environment(**extra)) as url:
        yield url


def test_server_started_by_sglang_serves_rounds_with_every_hook(sglang_server: str) -> None:
    """Also where code builds `ServerArgs` in a process that loads no plugins."""
    info = httpx.get(f"{sglang_server}/server_info", timeout=30).json()
    assert_all_hooks(info["april"])
    body = {"text": "1 2 3", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert httpx.post(f"{sglang_server}/generate", json=body, timeout=60).json()["meta_info"]["completion_tokens"] == 4
    requested = {"prompts": [{"id": "a", "text": "1 2 3"}], "quota": 1, "sampling_params": {"max_new_tokens": 4}}
    reply = httpx.post(f"{sglang_server}/april/rollout", json=requested, timeout=60).json()
    assert [group["id"] for group in reply["finished"]] == ["a"]


def test_server_of_another_model_is_plain_sglang(model: str, tmp_path: Path) -> None:
    """A job-wide environment names the model that is trained; a reward server, with an argument that is refused."""
    (tmp_path / "script.py").write_text(
        IN_CODE.replace("max_total_tokens", "enable_mixed_chunk=True, max_total_tokens")
    )
    port, settings = str(free_port()), json.dumps({"quota": 4, "model": str(tmp_path)})
    command, env = [str(tmp_path / "script.py"), model, port], environment(SGLANG_APRIL=settings, SGLANG_APRIL_CPU="1")
    with serving(command, port, tmp_path / "log", env) as url:
        assert httpx.get(f"{url}/april/state", timeout=30).status_code == 404
        assert "april" not in httpx.get(f"{url}/server_info", timeout=30).json()
        params = {"max_new_tokens": 4, "ignore_eos": True, "custom_params": {"x-april-run": "r"}}
        body = {"text": "1 2 3", "sampling_params": params}
        meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
        assert (meta["completion_tokens"], "april" in meta) == (4, False)
        assert "this server is plain SGLang: --april-model is not" in (tmp_path / "log").read_text()


def test_requests_of_an_offline_engine(model: str) -> None:
    """Every hook is active, and a request of a run survives a pause with new weights (`attached-request`).

    One is aborted, and one is dropped whose caller goes.
    """
    length = 400
    command = [sys.executable, "-m", "tests.support.offline_engine", model, str(length)]
    env = environment(SGLANG_APRIL='{"quota": 4, "kv": "keep"}')
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=START_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert_all_hooks(answers["report"])
    assert answers["generated"]["completion_tokens"] == 4
    spans = [{"start": 0, "end": 4, "version": 0, "kv": "fresh"}]
    named = {"run": "r", "trajectory": "t", "group": None}
    assert answers["generated"]["april"] == {**named, "spans": spans, "policy_version": 0, "staleness": 0}
    pushed, aborted = answers["pushed"], answers["aborted"]
    assert pushed["finish_reason"] == {"type": "length", "length": length}
    assert [(s["version"], s["kv"]) for s in pushed["april"]["spans"]] == [(0, "fresh"), (1, "kept")]
    assert aborted["finish_reason"]["type"] == "abort"
    assert 0 < aborted["completion_tokens"] < length
    assert aborted["april"]["spans"] == [{"start": 0, "end": aborted["completion_tokens"], "version": 1, "kv": "fresh"}]


def assert_all_hooks(report: dict[str, Any]) -> None:
    assert report["hooks"] == [f"{path} [{row.kind}]" for row in versions.hook_table().HOOKS for path in row.paths]
    assert report["sglang"] == versions.installed()["sglang"]
