"""verl's V1 manager, with its workers in Ray, on a live server. Run by tests/integration/test_verl.py."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import transfer_queue
from hydra import compose, initialize_config_module
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from sglang_april.integrations.verl.agent_loop import AttachedClient
from sglang_april.integrations.verl.agent_loop_tq import AgentLoopManager
from sglang_april.integrations.verl.weights import ServerAdapter
from tests.frameworks.verl_fixtures import push, run
from tests.support.live import LiveServer, until
from tests.support.server import ROOT

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
        "trainer.v1.trainer_mode=colocate_async", "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    )  # fmt: skip


def without_model_type(worker: Any) -> None:
    """verl would expect the special tokens of Qwen3, whose shape the tiny model has."""
    worker.hf_model_type = None


@pytest.mark.parametrize(("hybrid", "refused"), [(True, True), (False, False)])
def test_separate_async(hybrid: bool, refused: bool, verl_client: FullyAsyncLLMServerClient) -> None:
    config = composed("trainer.v1.trainer_mode=separate_async", f"actor_rollout_ref.hybrid_engine={hybrid}")
    if refused:
        with pytest.raises(ValueError, match="hybrid_engine=False"):
            AgentLoopManager(config, verl_client)
    else:
        assert isinstance(AgentLoopManager(config, verl_client).llm_client, AttachedClient)


@ray.remote
class StepActor:
    """What the actor of verl's server does beside its HTTP server, which is the live one here."""

    global_steps: int | None = None

    def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    transfer_queue.close()
    ray.shutdown()


def test_workers_and_transfer_queue_in_ray(
    cluster: None, live: LiveServer, v1_config: Any, adapter: ServerAdapter
) -> None:
    """As verl's V1 trainer: the manager sends the client to its workers, which write samples to the transfer queue."""
    transfer_queue.init(v1_config.transfer_queue)
    actor = StepActor.remote()
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({f"127.0.0.1:{live.server.port}": actor})
    adapter.server_actor = actor
    v1_config.actor_rollout_ref.rollout.agent.num_workers = 1
    manager = AgentLoopManager.create(v1_config, FullyAsyncLLMServerClient(v1_config, balancer))
    assert isinstance(manager, AgentLoopManagerTQ)
    for worker in manager.agent_loop_workers:
        ray.get(worker.__ray_call__.remote(without_model_type))
    run(lambda: push(adapter, live, 0, 3))
    prompt = {"raw_prompt": [[{"role": "user", "content": "one two"}]], "uid": ["u1"], "index": [0]}
    with live.server.slowed(0.05):
        before = live.decodes()
        manager.generate_sequences(get_tensordict(prompt, {"global_steps": 3}))
        until(lambda: live.running() == 2 and live.decodes() > before + 5, "both samples decode")
        prefills = sum(not row["decode"] for row in live.server.forwards())
        live.server.post("/pause_generation", {"mode": "abort"})
        run(lambda: push(adapter, live, 1, 4))
        live.server.post("/continue_generation", {})

    def tags() -> dict[str, Any]:
        return dict(transfer_queue.kv_list("train")["train"])

    until(lambda: tags()["u1"]["status"] != "running", "both samples are in the queue")
    assert sum(not row["decode"] for row in live.server.forwards()) == prefills
    found = tags()
    assert found.pop("u1")["status"] == "finished"
    assert sorted(found) == ["u1_0_0", "u1_1_0"]
    for tag in found.values():
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (3, 4)
        assert 5 < tag["response_len"] <= 60


def test_metric_of_the_page_is_verls() -> None:
    page = (ROOT / "docs/integrations/verl.md").read_text()
    (metric,) = re.findall(r"`(training/.*?)`", page)
    assert f'"{metric}"' in inspect.getsource(trainer_base)
