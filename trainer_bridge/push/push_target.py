"""One engine as a push sees it: our push routes, and SGLang's own weight calls."""

from typing import Any

import httpx

from sglang_april.client import AprilClient
from trainer_bridge.handshake import EngineFacts


class WeightCallError(RuntimeError):
    """An engine refused a weight call, or could not be asked."""


class PushTarget:
    """Calls to one engine; its weight calls wait without limit, for SGLang's own requests may be in their way."""

    def __init__(self, facts: EngineFacts, api_key: str | None = None) -> None:
        self.facts, self.url = facts, facts.url
        self.april = AprilClient(facts.url, api_key)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=facts.url, headers=headers, timeout=httpx.Timeout(None, connect=10.0))

    def weight_call(self, path: str, body: dict[str, Any]) -> None:
        """One of SGLang's weight routes; raises `WeightCallError` unless it says that it succeeded."""
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
