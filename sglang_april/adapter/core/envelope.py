"""The SGLang envelope of `sglang_april.api.messages` messages: one `bytes` field each way.

SGLang builds its msgpack decoder when it imports `io_struct`, for the types registered by then. Every process that
loads plugins imports this module, which registers these two types (`hook_custom_types`).
"""

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class AprilReq(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """HTTP process to scheduler; `payload` is an encoded `Command` or `Observation`."""

    payload: bytes


class AprilOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Scheduler to HTTP process; `payload` is an encoded `Event`."""

    payload: bytes


hook_custom_types(AprilReq, AprilOutput)
