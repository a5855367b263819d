"""Fixtures and helpers of the cases for verl."""

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer, patch_torch
from torch.distributed.device_mesh import init_device_mesh
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl.workers.rollout.sglang_rollout import sglang_rollout
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from sglang_april.integrations.verl.agent_loop import AttachedClient
from sglang_april.integrations.verl.weights import ServerAdapter
from tests.frameworks.verl_server import Handle, connected_adapter, connected_server
from tests.support.live import LiveServer, until

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "(tokyo|new york)"\}\}\n</tool_call>'
IDS = [9, 8, 7, 6, 5]


@pytest.fixture
def config(live: LiveServer) -> Any:
    rollout = {
        "name": "sglang", "prompt_length": 400, "response_length": 300, "max_model_len": None,
        "enable_rollout_routing_replay": False, "full_determinism": False,
        "multi_turn": {
            "max_user_turns": None, "max_assistant_turns": 3, "max_parallel_calls": 1, "max_tool_response_length": 256,
            "tool_response_truncate_side": "left", "format": "hermes",
        },
    }  # fmt: skip
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}, "data": {}})


@pytest.fixture
def server(live: LiveServer) -> SGLangHttpServer:
    return connected_server(live)


@pytest.fixture
def verl_client(config: Any, server: SGLangHttpServer, live: LiveServer) -> FullyAsyncLLMServerClient:
    """verl's client of partial rollouts: it collects tokens over aborts, and sends them again."""
    balancer = GlobalRequestLoadBalancer({f"127.0.0.1:{live.server.port}": Handle(server)})
    return FullyAsyncLLMServerClient(config, Handle(balancer))


@pytest.fixture
def attached_client(verl_client: FullyAsyncLLMServerClient) -> AttachedClient:
    return AttachedClient(verl_client)


@pytest.fixture(scope="session")
def mesh() -> Iterator[Any]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield init_device_mesh("cpu", mesh_shape=(1, 1, 1), mesh_dim_names=["dp", "infer_tp", "infer_pp"])
    torch.distributed.destroy_process_group()


@pytest.fixture
def adapter(mesh: Any, live: LiveServer, server: SGLangHttpServer, monkeypatch: pytest.MonkeyPatch) -> ServerAdapter:
    # There is no GPU whose memory could be shared: the tensors themselves are sent.
    monkeypatch.setattr(sglang_rollout, "_to_ipc_device", lambda tensor: tensor)
    monkeypatch.setattr(patch_torch, "monkey_patch_torch_reductions", lambda: None)
    monkeypatch.setattr(MultiprocessingSerializer, "serialize", staticmethod(pickle.dumps))
    return connected_adapter(mesh, live, server)


async def push(adapter: ServerAdapter, live: LiveServer, seed: int, step: int | None) -> int:
    """Push the weights of a seed as verl's worker does; return the new version."""
    before = live.version
    live.server.loaded = live.model(seed)
    await adapter.update_weights(iter(load_file(live.model(seed) / "model.safetensors").items()), global_steps=step)
    assert live.version == before + 1, "one push, one version"
    live.policies[live.version] = live.model(seed)
    return live.version


async def generate(client: Any, length: int = 60, **params: Any) -> Any:
    sampling = {**GREEDY, "ignore_eos": True, "max_tokens": length, **params}
    return await client.generate("r1", prompt_ids=IDS, sampling_params=sampling)


async def decoding(live: LiveServer, task: "asyncio.Task[Any]", steps: int = 5) -> None:
    before = live.decodes()
    await asyncio.to_thread(until, lambda: task.done() or live.decodes() > before + steps, "the request decodes")
    assert not task.done(), task.result()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())
