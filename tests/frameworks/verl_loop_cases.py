"""verl's agent loops on a live server. Run by tests/integration/test_verl.py."""

import asyncio
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopManager as VerlManager
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from sglang_april import config as april_config
from sglang_april.integrations.verl.agent_loop import AgentLoopManager, AttachedClient
from sglang_april.integrations.verl.weights import ServerAdapter
from tests.frameworks.verl_fixtures import CALL, GREEDY, decoding, generate, push, run
from tests.support.live import LiveServer, until
from tests.support.server import ROOT

pytest_plugins = ("tests.frameworks.verl_fixtures",)


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


def test_overrides_of_the_page_are_accepted_by_verls_configuration() -> None:
    """As a shell passes them on. Hydra refuses JSON without quotes, and without `+` what is not in verl's files."""
    page = (ROOT / "docs/integrations/verl.md").read_text()
    (command,) = re.findall(r"^(python -m verl\.trainer\.main_ppo .*?)^```", page, re.MULTILINE | re.DOTALL)
    overrides = shlex.split(command.replace("\\\n", " "))[4:]
    assert len(overrides) == 3
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", overrides=overrides)
    rollout, env = composed.actor_rollout_ref.rollout, composed.ray_kwargs.ray_init.runtime_env.env_vars
    assert april_config.from_env({"SGLANG_APRIL": env.SGLANG_APRIL})["quota"] == 32
    assert rollout.name == "sglang"
    assert rollout.agent.agent_loop_manager_class.endswith(".agent_loop_tq.AgentLoopManager")
