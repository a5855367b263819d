"""The manager for verl's V1 trainers, whose workers write to the transfer queue:

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=sglang_april.integrations.verl.agent_loop_tq.AgentLoopManager
"""

from verl.trainer.ppo.v1 import agent_loop_tq

from sglang_april.integrations.verl.agent_loop import Attached


class AgentLoopManager(Attached, agent_loop_tq.AgentLoopManagerTQ):
    """`AgentLoopManagerTQ` with a client that sends attached requests."""
