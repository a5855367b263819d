"""One engine as the target of a push: the plugin's push routes and SGLang's weight routes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from sglang_april.client import AprilClient
from sglang_april.client.keep_alive import with_keep_alive
from trainer_bridge.handshake import EngineInfo


class WeightCallError(RuntimeError):
    """An engine refused a weight call or could not be reached."""


class PushTarget:
    """The HTTP connections to one engine. Weight calls have no timeout: SGLang's own requests may delay them."""

    def __init__(self, info: EngineInfo, api_key: str | None = None) -> None:
        self.info, self.url = info, info.url
        self.april = AprilClient(info.url, api_key)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        options = with_keep_alive(httpx.HTTPTransport, info.url, {"base_url": info.url, "headers": headers})
        self._http = httpx.Client(timeout=httpx.Timeout(None, connect=10.0), **options)

    def weight_call(self, path: str, body: dict[str, Any]) -> None:
        """Call one of SGLang's weight routes. Raises: WeightCallError: the reply does not report success."""
        try:
            response = self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise WeightCallError(f"{self.url}{path}: {error!r}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success and isinstance(answer, dict) and answer.get("success", False):
            return
        reason = answer.get("message", answer) if isinstance(answer, dict) else response.text[:300]
        raise WeightCallError(f"{self.url}{path}: {response.status_code} {reason}")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        self.april.close()


def call_all(threads: ThreadPoolExecutor, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of concurrent calls. All of them complete before the first error is raised."""
    futures = [threads.submit(call) for call in calls]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
