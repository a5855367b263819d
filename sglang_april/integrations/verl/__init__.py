"""verl's agent loops over attached requests (docs/integrations/verl.md).

`plugin` registers the weight adapter in every process of verl; `agent_loop` and `agent_loop_tq` have the managers whose
client sends attached requests; `weights` encloses each push.

Facts about verl's interface are those of the package verl 0.9.1: `verl/__init__.py` (plugins),
`verl/workers/rollout/base.py` (registry of weight adapters), `verl/workers/rollout/llm_server.py` (the client),
`verl/workers/rollout/sglang_rollout/` (server, weight adapter), `verl/trainer/main_ppo.py` (the manager's class).
"""
