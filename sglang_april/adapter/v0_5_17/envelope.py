"""The SGLang envelope of `sglang_april.api.messages` messages: one `bytes` field each way.

SGLang's msgpack decoder is built when `io_struct` is imported and knows only the types of that moment, so every process
that loads plugins imports this module, which adds ours (`hook_custom_types`).
"""

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class AprilReq(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """HTTP process to scheduler; `payload` is a `wire.Command`."""

    payload: bytes


class AprilOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Scheduler to HTTP process; `payload` is a `wire.Event`."""

    payload: bytes


hook_custom_types(AprilReq, AprilOutput)
