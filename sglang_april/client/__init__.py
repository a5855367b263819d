"""The Python client: synchronous and asynchronous, one method per route."""

from sglang_april.client.async_engine_pool import AsyncEnginePool
from sglang_april.client.attached import attach, attach_through_router
from sglang_april.client.calls import (
    AprilError,
    NotPatchedError,
    PushLeftOpenError,
    RoundLostError,
    ServerLostError,
)
from sglang_april.client.client import AprilClient, AsyncAprilClient
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.types import RecordedTrajectory, RolloutGroup, RolloutReply, RolloutSummary

__all__ = [
    "AprilClient",
    "AprilError",
    "AsyncAprilClient",
    "AsyncEnginePool",
    "EnginePool",
    "NotPatchedError",
    "PushLeftOpenError",
    "RecordedTrajectory",
    "RolloutGroup",
    "RolloutReply",
    "RolloutSummary",
    "RoundLostError",
    "ServerLostError",
    "attach",
    "attach_through_router",
]
