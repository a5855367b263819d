"""Which requests are repeated when the server is lost, and for how long."""

import time

import httpx

from sglang_april.client.calls import Calls, ServerLostError

REPEATABLE = ("/april/rollout", "/april/drop", "/april/trajectories/done")
REPEATABLE_OF_A_ROUND = ("/stop", "/judge", "/extend", "/ack", "/done")
"""Routes whose effect is the same if a request arrives twice."""
INTERVAL_S = 0.5
LOST = (httpx.TransportError, ServerLostError)
"""A lost connection; the refusal of a server that is shutting down."""


class Retries:
    """The attempts at one request; the first begins now."""

    def __init__(self, calls: Calls, request: httpx.Request) -> None:
        self._calls, self._request = calls, request
        self._sent = time.monotonic()
        self._until: float | None = None

    def sending(self) -> None:
        """An attempt begins."""
        self._sent = time.monotonic()

    def wait_s(self, error: httpx.TransportError | ServerLostError) -> float:
        """Seconds until the next attempt.

        `retry_s` begins at the first loss, because a round may run for hours before it. It begins again at a later
        loss, if the server was there for longer than `retry_s` in between.

        Raises:
            ServerLostError: `retry_s` is over, or the effect of the request could happen twice.
        """
        now, retry_s = time.monotonic(), self._calls.retry_s
        connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        if self._until is None or (connected and now - self._sent > retry_s):
            self._until = now + retry_s
        if now < self._until and self._is_repeatable():
            return min(INTERVAL_S, self._until - now)
        raise self._lost(error) from None  # the message names the cause; httpx adds sixty lines to a traceback

    def _is_repeatable(self) -> bool:
        path = self._request.url.path
        return self._request.method == "GET" or path in REPEATABLE or path.endswith(REPEATABLE_OF_A_ROUND)

    def _lost(self, error: httpx.TransportError | ServerLostError) -> ServerLostError:
        request, status, field = self._request, 0, "server"
        cause = f"{type(error).__name__}: {str(error) or 'no detail'}"
        if isinstance(error, ServerLostError):
            status, field, cause = error.status, error.field, error.reason
        what = f"no answer to {request.method} {request.url.path} ({cause})"
        if round_id := request.extensions.get("round_id"):
            what += f"; the round may still run: repeat the call with round_id={round_id!r}, which continues it"
        return ServerLostError(status, field, f"{self._calls.url}: {what}")
