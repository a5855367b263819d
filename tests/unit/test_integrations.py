"""The adapters for other trainers need the client alone: no SGLang, no torch, no `trainer_bridge`."""

import ast
import asyncio
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglang_april.client.keep_alive import SOCKET_OPTIONS
from sglang_april.integrations.verl.plugin import check_config
from tests.support.pages import ROOT

ADAPTERS = sorted((ROOT / "sglang_april/integrations").rglob("*.py"))
ALLOWED = ("sglang_april.client", "sglang_april.integrations", "httpx", "msgspec", "verl", "areal")
FORBIDDEN = ("torch", "sglang", "trainer_bridge", "ray", "transformers", "verl", "areal", "sglang_april.adapter")


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_adapters_import_the_client_and_their_framework(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            assert name is not None
            assert name.startswith(ALLOWED) or name.split(".")[0] in sys.stdlib_module_names, f"{path.name}: {name}"


def test_client_and_entry_points_import_nothing_heavy() -> None:
    modules = "sglang_april.client.engine_pool", "sglang_april.client.attached", "sglang_april.integrations.slime"
    modules += "sglang_april.integrations.miles", verl_plugin()
    lines = [f"import sys, {', '.join(modules)}", f"print([name for name in {FORBIDDEN} if name in sys.modules])"]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def verl_plugin() -> str:
    """The entry point that verl loads."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (module,) = points["verl.plugins"].values()
    return str(module)


def test_entry_point_of_verl_replaces_its_weight_adapter_only_when_activated() -> None:
    """verl's registry holds dotted names, so a module of its name suffices here; the live tests use verl's own."""
    code = (
        "import sys, types, os\n"
        "for name in ('verl', 'verl.workers', 'verl.workers.rollout', 'verl.workers.rollout.base'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "base = sys.modules['verl.workers.rollout.base']\n"
        "sys.modules['verl.workers.rollout'].base = base\n"
        "base._ROLLOUT_REGISTRY = {('sglang', 'async'): 'verl'}\n"
        f"import {verl_plugin()} as plugin\n"
        "print(base._ROLLOUT_REGISTRY['sglang', 'async'])"
    )
    for settings, expected in (
        ("", "verl"),
        ('{"quota": 8}', "sglang_april.integrations.verl.weights.ServerAdapter"),
    ):
        environment = {"PYTHONPATH": str(ROOT), "SGLANG_APRIL": settings}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_connections_of_verls_client_notice_a_machine_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of verl that the module imports are replaced: the live tests use verl's own."""
    for name, contents in {
        "verl.experimental.agent_loop": {"agent_loop": SimpleNamespace(AgentLoopManager=object)},
        "verl.utils": {"normalize_token_ids": None},
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda method: method},
        "verl.workers.rollout.llm_server": {"LLMServerClient": object},
        "verl.workers.rollout.replica": {"TokenOutput": None},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))  # type: ignore[arg-type]
    spec = spec_from_file_location("agent_loop", ROOT / "sglang_april/integrations/verl/agent_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    client = object.__new__(module.AttachedClient)
    client._http = None
    with pytest.raises(httpx.ConnectError):
        asyncio.run(client._send("GET", "127.0.0.1:1", "/"))
    pool = client._http._transport._pool
    assert (pool._socket_options, pool._max_keepalive_connections) == (SOCKET_OPTIONS, 0)


@pytest.mark.parametrize(
    ("actor", "mode", "named"),
    [
        ({"hybrid_engine": True}, "separate_async", "hybrid_engine=False"),
        ({}, "separate_async", "hybrid_engine=False"),  # verl's default is True
        ({"hybrid_engine": False}, "separate_async", None),
        ({"hybrid_engine": True}, "colocate_async", None),
        ({"hybrid_engine": True}, "sync", None),
        ({"rollout": {"enable_rollout_routing_replay": True}}, "sync", "enable_rollout_routing_replay"),
    ],
)
def test_settings_of_verl_that_would_lose_requests_are_refused(
    actor: dict[str, Any], mode: str, named: str | None
) -> None:
    config = {"actor_rollout_ref": {"rollout": {}, **actor}, "trainer": {"v1": {"trainer_mode": mode}}}
    if named is None:
        check_config(config)
        return
    with pytest.raises(ValueError, match=named):
        check_config(config)
