"""The manager for verl's V1 trainers, whose workers write to the transfer queue; set it as the manager's class:

actor_rollout_ref.rollout.agent.agent_loop_manager_class=sglang_april.integrations.verl.agent_loop_tq.AgentLoopManager
"""

from typing import Any

from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.rollout.llm_server import LLMServerClient

from sglang_april.integrations.verl.agent_loop import attached_client


class AgentLoopManager(agent_loop_tq.AgentLoopManagerTQ):
    """`AgentLoopManagerTQ` with a client that sends attached requests."""

    def __init__(self, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, attached_client(config, llm_client), *args, **kwargs)
