"""AReaL's inference engine with attached requests, and the exact version of every token (docs/integrations/areal.md):

    areal.trainer.rl_trainer.RemoteSGLangEngine = sglang_april.integrations.areal.SGLangEngine

Facts about AReaL's interface are those of the package areal 1.0.4: `areal/engine/sglang_remote.py`,
`areal/infra/remote_inf_engine.py` and `areal/trainer/rl_trainer.py`.
"""

import os
import subprocess
import sys
import uuid
from contextvars import ContextVar
from typing import Any

from areal.api import ModelRequest, ModelResponse
from areal.api.cli_args import InferenceEngineConfig, SGLangConfig
from areal.api.io_struct import HttpGenerationResult, HttpRequest, WeightUpdateRequests
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.infra import RemoteInfEngine
from areal.infra.utils.launcher import TRITON_CACHE_PATH

from sglang_april.client.attached import attach, read_generated

LAUNCHER = "sglang_april.launch_server"
"""In place of AReaL's launch module, which starts the scheduler without SGLang's plugin loader."""

_versions: ContextVar[list[int]] = ContextVar("versions")
"""Versions of the tokens that the current `agenerate` has received."""


class Backend(SGLangBackend):
    """Builds and reads requests. What cannot be attached (LoRA, images, routed experts) is sent as AReaL sends it."""

    def build_generation_request(self, req: ModelRequest, with_lora: bool, version: int) -> HttpRequest:
        request = super().build_generation_request(req, with_lora, version)
        if with_lora or req.image_data or req.metadata.get("return_routed_experts"):
            return request
        params = request.payload["sampling_params"]
        if params["top_k"] >= 10**6:  # AReaL's value for "all"
            params["top_k"] = -1
        if not params["frequency_penalty"]:
            del params["frequency_penalty"]
        params["custom_params"] = attach(os.environ.get("SGLANG_APRIL_RUN", "areal"))
        return request

    def parse_generation_response(self, response: dict[str, Any]) -> HttpGenerationResult:
        result = super().parse_generation_response(response)
        if response["meta_info"].get("april"):
            _versions.get().extend(read_generated(response).versions)
        return result

    def build_disk_weight_update_requests(self, meta: Any) -> WeightUpdateRequests:
        return _named(super().build_disk_weight_update_requests(meta), meta.version)

    def build_distributed_weight_update_requests(self, meta: Any, param_specs: Any) -> WeightUpdateRequests:
        return _named(super().build_distributed_weight_update_requests(meta, param_specs), meta.version)

    def launch_server(self, server_args: dict[str, Any]) -> "subprocess.Popen[bytes]":
        """As AReaL's, with the launcher of sglang-april; the variable `SGLANG_APRIL` contains the settings."""
        command = SGLangConfig.build_cmd_from_args(server_args)
        command[command.index("-m") + 1] = LAUNCHER
        cache = os.environ.get("TRITON_CACHE_PATH", TRITON_CACHE_PATH)
        env = {**os.environ, "TRITON_CACHE_PATH": os.path.join(cache, str(uuid.uuid4()))}  # noqa: PTH118 - as AReaL
        return subprocess.Popen(command, env=env, stdout=sys.stdout, stderr=sys.stdout)


class _InnerEngine(RemoteInfEngine):
    """The engine that AReaL's workflow executor passes to workflows."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """As AReaL's; `output_versions` is the version that drew each token, as the engine counts them."""
        token = _versions.set([])
        try:
            response = await super().agenerate(req)
            if versions := _versions.get():
                response.output_versions = versions
            return response
        finally:
            _versions.reset(token)


class SGLangEngine(RemoteSGLangEngine):
    """`RemoteSGLangEngine` whose pause suspends requests instead of ending them."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config)
        self._engine = _InnerEngine(config, Backend())


def _named(requests: WeightUpdateRequests, version: int | None) -> WeightUpdateRequests:
    """The requests of a push, under AReaL's version. They need not abort anything: AReaL has paused the servers."""
    for request in requests.requests:
        if "abort_all_requests" in request.payload:
            request.payload["abort_all_requests"] = False
            if version is not None:
                request.payload["weight_version"] = str(version)
    return requests
