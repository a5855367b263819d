"""verl's agent-loop manager with a client that sends every request to its server as an attached request:

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=sglang_april.integrations.verl.agent_loop.AgentLoopManager

A pause suspends such a request; it resumes with its tokens and KV under the next weights, and its caller waits.
"""

import os
from typing import Any

import httpx
from verl.experimental.agent_loop import agent_loop
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sglang_april.client.attached import attach, read_generated
from sglang_april.client.calls import Calls
from sglang_april.client.keep_alive import with_keep_alive
from sglang_april.integrations.verl.plugin import check_config, check_registered, recorded_steps

OPTIONS = {"limits": httpx.Limits(max_connections=None, max_keepalive_connections=0), "trust_env": False}
"""As many requests at once as there are agent loops. No connection is used twice, because the server may close an idle
one just when a request is sent on it."""


class AttachedClient(LLMServerClient):
    """Sends the requests of agent loops over HTTP, attached to a run; routes them as verl's own client does."""

    def __init__(self, client: LLMServerClient) -> None:
        """`client`: verl's own. It chooses the server, and sends what cannot be attached."""
        super().__init__(client.config, client._load_balancer)
        self._client = client
        self._run = os.environ.get("SGLANG_APRIL_RUN", "verl")
        self._http: httpx.AsyncClient | None = None
        self._context: dict[str, int] = {}
        """Context length of each server, in tokens."""
        self._steps: dict[str, dict[int, int | None]] = {}
        """Training step of each policy version, of each server."""

    @rollout_trace_op
    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """As `LLMServerClient.generate`; `min_global_steps` and `max_global_steps` are those of the tokens.

        Raises:
            ValueError: the prompt does not fit the context.
            AprilError: the server refused the request, or runs without sglang-april.
        """
        if any(kwargs.get(name) for name in ("image_data", "video_data", "audio_data")):
            return await self._client.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
            )
        prompt_ids = normalize_token_ids(prompt_ids)
        fields = {"prompt_ids": prompt_ids, "sampling_params": sampling_params, **kwargs}
        address, server = await self._client._acquire_server(request_id, **fields)
        try:
            params = await self._params(address, len(prompt_ids), sampling_params)
            return_logprob = params.pop("logprobs", False)
            body = {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": bool(return_logprob)}
            answer = await self._send("POST", address, "/generate", json=body, headers=attach(self._run))
            return await self._output(address, server, answer, bool(return_logprob))
        finally:
            self._client._release_server(address, request_id=request_id)

    async def _params(self, address: str, prompt_len: int, given: dict[str, Any]) -> dict[str, Any]:
        """SGLang's names, and a length that fits the context: what verl's `SGLangHttpServer.generate` does."""
        rollout, params = self.config.actor_rollout_ref.rollout, dict(given)
        available = (rollout.get("max_model_len") or await self._context_length(address)) - prompt_len - 1
        if available < 0:
            raise ValueError(f"prompt_ids: {prompt_len} tokens exceed the context of the model")
        total = rollout.prompt_length + rollout.response_length
        length = params.pop("max_tokens", min(rollout.response_length, total - prompt_len))
        params["max_new_tokens"] = max(0, min(params.pop("max_new_tokens", length), available))
        return params

    async def _output(self, address: str, server: Any, answer: dict[str, Any], return_logprob: bool) -> TokenOutput:
        generated = read_generated(answer)
        versions = generated.versions or [generated.policy_version]
        first, last = [await self._step(address, server, version) for version in (versions[0], versions[-1])]
        return TokenOutput(
            token_ids=generated.output_ids,
            log_probs=generated.logprobs if return_logprob else None,
            stop_reason=generated.finish_reason,
            extra_fields={
                "global_steps": last,
                "min_global_steps": first,
                "max_global_steps": last,
                "num_cached_tokens": answer["meta_info"].get("cached_tokens"),
            },
        )

    async def _step(self, address: str, server: Any, version: int) -> int | None:
        """The training step whose weights a policy version has; None for those that the server started with."""
        if version not in self._steps.get(address, {}):
            self._steps[address] = {0: None, **await server.__ray_call__.remote(recorded_steps)}
        if version not in self._steps[address]:
            raise RuntimeError(
                f"sglang_april: {address} is at policy version {version}, which no push of this job has made: the"
                " weight adapter of sglang_april.integrations.verl is not active in the rollout workers"
            )
        return self._steps[address][version]

    async def _context_length(self, address: str) -> int:
        if address not in self._context:
            models = await self._send("GET", address, "/v1/models")
            self._context[address] = int(models["data"][0]["max_model_len"])
        return self._context[address]

    async def _send(self, method: str, address: str, path: str, **options: Any) -> dict[str, Any]:
        if self._http is None:  # in the process and event loop that send
            transport = with_keep_alive(httpx.AsyncHTTPTransport, f"http://{address}", OPTIONS)
            self._http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=60), **transport)
        content: dict[str, Any] = Calls.content(await self._http.request(method, f"http://{address}{path}", **options))
        return content


def attached_client(config: Any, client: LLMServerClient) -> AttachedClient:
    """The client for a manager's workers.

    Raises:
        RuntimeError: the weight adapter is not registered.
        ValueError: a setting of verl that attached requests cannot honour.
    """
    check_registered()
    check_config(config)
    return AttachedClient(client)


class AgentLoopManager(agent_loop.AgentLoopManager):
    """The manager for verl's trainers before V1; `agent_loop_tq` contains the one for V1."""

    def __init__(self, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, attached_client(config, llm_client), *args, **kwargs)
