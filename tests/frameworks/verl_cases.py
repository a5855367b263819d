"""verl's agent loops, clients and weight adapter on a live server. Run by tests/integration/test_verl.py."""

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer, patch_torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopManager as VerlManager
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl.workers.rollout.sglang_rollout import sglang_rollout
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from sglang_april.client import AprilError, PushLeftOpenError
from sglang_april.integrations.verl.agent_loop import AgentLoopManager, AttachedClient
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


@pytest.fixture(scope="module")
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


def test_weight_adapter_is_registered() -> None:
    assert get_rollout_class("sglang") is ServerAdapter


def test_one_request_spans_two_steps_where_verl_takes_two(
    live: LiveServer, attached_client: AttachedClient, verl_client: FullyAsyncLLMServerClient, server: SGLangHttpServer,
    adapter: ServerAdapter,
) -> None:  # fmt: skip
    """verl's sequence of a push: abort (a pause), buckets, resume. Both clients deliver all tokens, with both steps."""

    async def over_a_push(client: Any, step: int) -> Any:
        with live.server.slowed(0.05):
            task = asyncio.create_task(generate(client))
            await decoding(live, task)
            await server.abort_all_requests()
            await push(adapter, live, step % 2, step)
        await server.resume_generation()
        return await task

    async def scenario() -> None:
        first = await push(adapter, live, 0, 7)
        mine = await over_a_push(attached_client, 9)
        other = await over_a_push(verl_client, 11)
        for output, steps in ((mine, (7, 9)), (other, (9, 11))):
            assert len(output.token_ids) == len(output.log_probs) == 60
            assert output.stop_reason == "length"
            fields = output.extra_fields
            assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (
                *steps,
                steps[1],
            )
        assert set(mine.extra_fields) >= {"num_cached_tokens"}
        assert live.server.state()["policy_version"] == first + 2

    run(scenario)


def test_tokens_and_logprobs_over_a_push_are_those_of_a_replay(
    live: LiveServer, attached_client: AttachedClient, server: SGLangHttpServer, adapter: ServerAdapter
) -> None:
    async def scenario() -> None:
        answers: list[Any] = []
        send = attached_client._send

        async def kept(*args: Any, **named: Any) -> Any:
            answers.append(await send(*args, **named))
            return answers[-1]

        attached_client._send = kept  # type: ignore[method-assign]
        await push(adapter, live, 0, 1)
        with live.server.slowed(0.05):
            task = asyncio.create_task(generate(attached_client, temperature=0.8, sampling_seed=5))
            await decoding(live, task)
            await server.abort_all_requests()
            await push(adapter, live, 1, 2)
        await server.resume_generation()
        output = await task
        spans = answers[-1]["meta_info"]["april"]["spans"]
        assert [span["kv"] for span in spans] == ["fresh", "kept"]
        assert answers[-1]["meta_info"]["april"]["run"] == "verl"
        sample = {"index": 0, "output_ids": output.token_ids, "logprobs": output.log_probs, "spans": spans, "seed": 5}
        live.check([{"id": "r", "prompt_ids": IDS, "samples": [sample]}], {"r": {"temperature": 0.8}})

    run(scenario)


def test_a_push_of_validation_has_the_step_before(
    live: LiveServer, attached_client: AttachedClient, adapter: ServerAdapter, server: SGLangHttpServer
) -> None:
    """verl pushes the same weights again after a validation, without a step: the version moves, the step does not."""

    async def scenario() -> None:
        await push(adapter, live, 0, 3)
        await push(adapter, live, 0, None)
        assert (await generate(attached_client, 4)).extra_fields["global_steps"] == 3
        await push(adapter, live, 1, 4)
        assert (await generate(attached_client, 4)).extra_fields["global_steps"] == 4

    run(scenario)


def test_a_version_that_no_push_has_made_is_an_error(live: LiveServer, attached_client: AttachedClient) -> None:
    live.push(1)
    with pytest.raises(RuntimeError, match="weight adapter"):
        run(lambda: generate(attached_client, 4))


def test_a_failed_push_keeps_requests_waiting(
    live: LiveServer, attached_client: AttachedClient, adapter: ServerAdapter
) -> None:
    def broken() -> Iterator[Any]:
        yield from list(load_file(live.model(1) / "model.safetensors").items())[:3]
        raise OSError("the trainer failed")

    async def scenario() -> None:
        await push(adapter, live, 0, 1)
        with live.server.slowed(0.05):
            task = asyncio.create_task(generate(attached_client))
            await decoding(live, task)
            with pytest.raises(PushLeftOpenError):
                await adapter.update_weights(broken(), global_steps=2)
            count = len(live.server.forwards())
        await asyncio.sleep(0.5)
        assert len(live.server.forwards()) == count
        await push(adapter, live, 1, 2)
        assert len((await task).token_ids) == 60

    run(scenario)


def test_lengths_are_clamped_as_verl_clamps_them(
    live: LiveServer, attached_client: AttachedClient, verl_client: FullyAsyncLLMServerClient, adapter: ServerAdapter
) -> None:
    async def scenario() -> None:
        await push(adapter, live, 0, 1)
        prompt = list(range(6, 506)) * 4  # 2,000 tokens of a context of 2,048
        for given in ({"max_tokens": 100}, {"max_new_tokens": 100}):
            params = {**GREEDY, "ignore_eos": True, **given}
            lengths = [
                len((await client.generate("r", prompt_ids=prompt, sampling_params=dict(params))).token_ids)
                for client in (attached_client, verl_client)
            ]
            assert lengths == [46, 46]  # both ask for 47, and SGLang keeps one more position free
        default = {**GREEDY, "ignore_eos": True}
        assert len((await attached_client.generate("r", prompt_ids=IDS, sampling_params=default)).token_ids) == 300
        assert default == {**GREEDY, "ignore_eos": True}, "the caller's parameters are unchanged"
        with pytest.raises(ValueError, match="context"):
            await attached_client.generate("r", prompt_ids=prompt + prompt, sampling_params=params)
        with pytest.raises(AprilError, match="input_ids"):
            await attached_client.generate("r", prompt_ids=[10**6], sampling_params=params)

    run(scenario)


@pytest.fixture
def loop_options(config: Any, live: LiveServer) -> dict[str, Any]:
    return {
        "trainer_config": DictConfigWrap(config),
        "tokenizer": AutoTokenizer.from_pretrained(live.model(0)),
        "processor": None,
        "dataset_cls": RLHFDataset,
        "data_config": DictConfigWrap(config.data),
    }


def test_single_turn_agent_loop(
    live: LiveServer, attached_client: AttachedClient, loop_options: dict[str, Any], adapter: ServerAdapter
) -> None:
    async def scenario() -> None:
        await push(adapter, live, 0, 1)
        loop = SingleTurnAgentLoop(server_manager=attached_client, **loop_options)
        params = {**GREEDY, "max_tokens": 30, "ignore_eos": True}
        output = await loop.run(dict(params), raw_prompt=[{"role": "user", "content": "one two"}])
        assert len(output.response_ids) == len(output.response_logprobs) == 30
        assert output.response_mask == [1] * 30
        assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 1

    run(scenario)


def test_tool_agent_loop_over_a_push(
    live: LiveServer, attached_client: AttachedClient, loop_options: dict[str, Any], server: SGLangHttpServer,
    adapter: ServerAdapter,
) -> None:  # fmt: skip
    """Three turns, each a tool call; a push suspends the first one."""
    examples = (
        Path(os.environ["APRIL_TEST_PACKAGES"]) / "package_tests/experimental/agent_loop/function_tool_examples.py"
    )
    tools = load_all_tools(None, str(examples))

    async def scenario() -> None:
        await push(adapter, live, 0, 1)
        loop = ToolAgentLoop(server_manager=attached_client, tools=ToolListWrap(tools), **loop_options)
        with live.server.slowed(0.03):
            task = asyncio.create_task(
                loop.run({**GREEDY, "regex": CALL}, raw_prompt=[{"role": "user", "content": "how is the weather"}])
            )
            await decoding(live, task)
            await server.abort_all_requests()
            await push(adapter, live, 1, 2)
        await server.resume_generation()
        output = await task
        text = loop.tokenizer.decode(output.response_ids)
        assert text.count("<tool_call>") == 3
        assert "drizzle" in text or "sunny" in text
        assert output.num_turns == 6
        assert 0 in output.response_mask
        assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
        drawn = [p for p, mask in zip(output.response_logprobs, output.response_mask, strict=True) if mask]
        assert max(drawn) <= 0
        assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (1, 2)

    run(scenario)


def test_a_cancelled_agent_loop_ends_its_request(
    live: LiveServer, attached_client: AttachedClient, adapter: ServerAdapter
) -> None:
    async def scenario() -> None:
        await push(adapter, live, 0, 1)
        with live.server.slowed(0.05):
            task = asyncio.create_task(generate(attached_client, 500))
            await decoding(live, task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(until, lambda: live.server.state()["attached"] == {}, "the request is gone")
        balancer = attached_client._client._load_balancer._target
        assert balancer.get_total_inflight() == 0

    run(scenario)


def test_managers_give_their_workers_the_attached_client(config: Any, verl_client: FullyAsyncLLMServerClient) -> None:
    manager = AgentLoopManager(config, verl_client)
    assert isinstance(manager, VerlManager)
    assert isinstance(manager.llm_client, AttachedClient)
    config.actor_rollout_ref.rollout.enable_rollout_routing_replay = True
    with pytest.raises(ValueError, match="routing_replay"):
        AgentLoopManager(config, verl_client)


def test_without_the_weight_adapter_no_manager_starts(
    config: Any, verl_client: FullyAsyncLLMServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.workers.rollout import base

    monkeypatch.setitem(base._ROLLOUT_REGISTRY, ("sglang", "async"), "verl_client")
    with pytest.raises(RuntimeError, match="SGLANG_APRIL"):
        AgentLoopManager(config, verl_client)
