"""verl's V1 manager and its worker on a live server. Run by tests/integration/test_verl.py."""

import asyncio
from typing import Any

import pytest
import transfer_queue
from hydra import compose, initialize_config_module
from verl.trainer.ppo.v1 import agent_loop_tq as verl_v1
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from sglang_april.integrations.verl.agent_loop import AttachedClient
from sglang_april.integrations.verl.agent_loop_tq import AgentLoopManager
from sglang_april.integrations.verl.weights import ServerAdapter
from tests.frameworks.verl_fixtures import decoding, push, run
from tests.support.live import LiveServer, until

pytest_plugins = ("tests.frameworks.verl_fixtures",)


def composed(*overrides: str) -> Any:
    """verl's configuration as its command composes it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=sglang", *overrides])


@pytest.fixture
def v1_config(live: LiveServer) -> Any:
    return composed(
        f"actor_rollout_ref.model.path={live.model(0)}", "actor_rollout_ref.rollout.prompt_length=400",
        "actor_rollout_ref.rollout.response_length=60", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.calculate_log_probs=True",
        "trainer.v1.trainer_mode=colocate_async",
    )  # fmt: skip


class Queue:
    """What a worker writes to the transfer queue, whose storage runs in Ray actors."""

    def __init__(self) -> None:
        self.statuses: list[str] = []
        self.tags: dict[str, Any] = {}

    async def put(self, *, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.statuses.append(tag["status"])

    async def put_batch(self, *, keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        self.tags |= dict(zip(keys, tags, strict=True))


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(transfer_queue, "init", lambda: None)
    monkeypatch.setattr(transfer_queue, "async_kv_put", made.put)
    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", made.put_batch)
    return made


def test_worker_of_v1_over_a_push(
    live: LiveServer, v1_config: Any, verl_client: FullyAsyncLLMServerClient, server: SGLangHttpServer,
    adapter: ServerAdapter, queue: Queue,
) -> None:  # fmt: skip
    """The manager's client in verl's worker: both samples of a prompt span a push on their KV; tags have both steps."""
    manager = AgentLoopManager(v1_config, verl_client)
    assert isinstance(manager, verl_v1.AgentLoopManagerTQ)
    assert manager.agent_loop_workers_class is verl_v1.AgentLoopWorkerTQ
    worker_class = verl_v1.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = worker_class(v1_config, manager.llm_client)
    worker.hf_model_type = None  # verl would expect the special tokens of Qwen3, whose shape the tiny model has

    async def scenario() -> None:
        await push(adapter, live, 0, 3)
        prompt = {"raw_prompt": [[{"role": "user", "content": "one two"}]], "uid": ["u1"], "index": [0]}
        batch = get_tensordict(prompt, {"global_steps": 3})
        with live.server.slowed(0.05):
            await worker.generate_sequences(batch)
            (task,) = worker.background_tasks
            await asyncio.to_thread(until, lambda: live.running() == 2, "both samples run")
            await decoding(live, task)
            prefills = sum(not row["decode"] for row in live.server.forwards())
            await server.abort_all_requests()
            await push(adapter, live, 1, 4)
        await server.resume_generation()
        await task
        assert sum(not row["decode"] for row in live.server.forwards()) == prefills
        assert queue.statuses == ["running", "finished"]
        assert sorted(queue.tags) == ["u1_0_0", "u1_1_0"]
        for tag in queue.tags.values():
            assert (tag["min_global_steps"], tag["max_global_steps"], tag["response_len"]) == (3, 4, 60)

    run(scenario)


@pytest.mark.parametrize(("hybrid", "refused"), [(True, True), (False, False)])
def test_separate_async(hybrid: bool, refused: bool, verl_client: FullyAsyncLLMServerClient) -> None:
    config = composed("trainer.v1.trainer_mode=separate_async", f"actor_rollout_ref.hybrid_engine={hybrid}")
    if refused:
        with pytest.raises(ValueError, match="hybrid_engine=False"):
            AgentLoopManager(config, verl_client)
    else:
        assert isinstance(AgentLoopManager(config, verl_client).llm_client, AttachedClient)
