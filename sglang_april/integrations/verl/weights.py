"""verl's weight adapter for SGLang, with begin and end around each push: one policy version, however many buckets."""

from typing import Any

from verl.workers.rollout.sglang_rollout import sglang_rollout

from sglang_april.client import AsyncAprilClient
from sglang_april.integrations.verl.plugin import record_step


class ServerAdapter(sglang_rollout.ServerAdapter):
    """The weight adapter that replaces verl's (`plugin.py`)."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        """As verl's. If it fails, the push stays open, and requests of agent loops wait until one succeeds.

        Raises:
            ValueError: the weights are those of a LoRA adapter, which attached requests cannot use.
            PushLeftOpenError: verl's adapter failed.
        """
        if kwargs.get("peft_config") and kwargs.get("base_sync_done"):
            raise ValueError("sglang_april: LoRA adapters are not supported; merge them (lora.merge)")
        await self._init_server_adapter()
        if self._engine is None or not self._is_server_tp_leader():
            await super().update_weights(weights, global_steps=global_steps, **kwargs)
            return
        url = f"http://{self._engine.server_args.host}:{self._engine.server_args.port}"
        async with AsyncAprilClient(url, trust_env=False) as april:
            version = (await april.state())["policy_version"] + 1
            async with april.push(version):
                await super().update_weights(weights, global_steps=global_steps, **kwargs)
                await self.server_actor.__ray_call__.remote(record_step, version, global_steps)
