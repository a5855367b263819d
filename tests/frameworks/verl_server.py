"""verl's server and weight adapter in this process, connected to a live server instead of one that verl launches."""

import asyncio
import copy
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import httpx
from omegaconf import OmegaConf
from verl.workers.rollout.sglang_rollout import sglang_rollout
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from sglang_april.integrations.verl.weights import ServerAdapter
from tests.support.live import LiveServer


class Handle:
    """An object behind the interface of a Ray actor's handle."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_call__":
            return SimpleNamespace(remote=lambda call, *args: _started(call(self._target, *args)))
        call = getattr(self._target, name)
        return SimpleNamespace(remote=lambda *args, **named: _started(call(*args, **_copied(named))))


def _copied(named: dict[str, Any]) -> dict[str, Any]:
    """The receiver's own copy of plain data, as Ray makes it: verl's server changes the parameters it is given."""
    return {key: copy.deepcopy(value) if isinstance(value, dict | list) else value for key, value in named.items()}


def _started(result: Any) -> Awaitable[Any]:
    if asyncio.iscoroutine(result):
        return asyncio.ensure_future(result)
    future = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


class TokenizerManager:
    """SGLang's interface in the server's process, over HTTP: verl's server runs in another process here."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=180)

    async def generate_request(self, request: Any, _: None) -> Any:
        names = ("rid", "input_ids", "sampling_params", "return_logprob")
        answer = await self._http.post("/generate", json={name: getattr(request, name) for name in names})
        yield answer.raise_for_status().json()

    async def pause_generation(self, request: Any) -> None:
        (await self._http.post("/pause_generation", json={"mode": request.mode})).raise_for_status()

    async def continue_generation(self, _request: Any) -> None:
        (await self._http.post("/continue_generation", json={})).raise_for_status()


def connected_server(live: LiveServer) -> SGLangHttpServer:
    """verl's server object, without its launch: the live server is the engine behind it."""
    made = object.__new__(SGLangHttpServer)
    made.config = SimpleNamespace(
        max_model_len=2048, prompt_length=400, response_length=300, enable_rollout_routing_replay=False, mtp=None
    )
    made.model_config = SimpleNamespace(lora_rank=0, lora={}, lora_adapter_path=None)
    made.tokenizer_manager = TokenizerManager(live.server.url)
    made.replica_rank, made.node_rank, made.global_steps, made._disaggregation_role = 0, 0, None, "null"
    return made


def connected_adapter(mesh: Any, live: LiveServer, server: SGLangHttpServer) -> ServerAdapter:
    """The weight adapter with verl's own HTTP engine, connected as its `_init_server_adapter` does with Ray."""
    made = object.__new__(ServerAdapter)
    checkpoint = {"update_weights_bucket_megabytes": 1}
    made.config = OmegaConf.create({"checkpoint_engine": checkpoint, "quantization": None, "free_cache_engine": True})
    made.sleep_level = 2
    made.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"))
    made.device_mesh, made._pd_role, made._has_server = mesh, None, True
    made.server_actor = Handle(server)
    made._engine = object.__new__(sglang_rollout.AsyncHttpServerAdapter)
    made._engine.server_args = SimpleNamespace(host="127.0.0.1", port=live.server.port)
    made._engine.__dict__ |= {"node_rank": 0, "timeout": 60.0, "max_attempts": 3, "max_connections": 100}
    return made
