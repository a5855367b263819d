"""The client's calls without a transport: what is sent to each route, how an answer is read, and the errors."""

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from sglang_april.client.types import RolloutGroup, RolloutReply, RolloutSummary, read_event, read_reply

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}
T = TypeVar("T")

Step = Generator[httpx.Request, httpx.Response, T]
"""A call, written once for both clients: it yields requests and is sent their responses."""


class AprilError(Exception):
    """The server said no: `status` (HTTP), `field` and `reason`."""

    def __init__(self, status: int, field: str, reason: str) -> None:
        super().__init__(f"{status} {field}: {reason}")
        self.status, self.field, self.reason = status, field, reason


class NotPatchedError(AprilError):
    """The server answers, but as SGLang alone: the plugin is not active there."""


class PushLeftOpenError(RuntimeError):
    """A push failed between begin and end, so the server opens no rounds until a push succeeds."""


class Calls:
    """The routes without the transport: what is sent, and how an answer is read."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {**MSGPACK, **({"authorization": f"Bearer {api_key}"} if api_key else {})}
        self._checked = False

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Step[Any]:
        """Any route: the decoded answer."""
        yield from self._check()
        response = yield self._request(method, path, body, query)
        return self._content(response)

    def _rollout(self, body: Mapping[str, Any]) -> Step[RolloutReply]:
        return read_reply((yield from self._call("POST", "/april/rollout", body)))

    def _get_round(self, round_id: str) -> Step[RolloutReply | None]:
        """The reply of a round, or None while it is open."""
        yield from self._check()
        response = yield self._request("GET", f"/april/rounds/{round_id}", None, {})
        content = self._content(response)
        return None if response.status_code == 202 else read_reply(content)

    def _check(self) -> Step[None]:
        if self._checked:
            return
        response = yield self._request("GET", "/april/state", None, {})
        if response.status_code == 404:
            reason = "SGLang runs there without sglang-april; launch it with python -m sglang_april.launch_server"
            raise NotPatchedError(404, "server", f"{self._url}: {reason}")
        if not self._content(response)["http"]["hooks"]:
            raise NotPatchedError(500, "server", f"{self._url}: SGLang runs there without our hooks")
        self._checked = True

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, Any]
    ) -> httpx.Request:
        given = {name: value for name, value in query.items() if value is not None}
        content = None if body is None else msgspec.msgpack.encode(body)
        return httpx.Request(method, self._url + path, params=given or None, content=content, headers=self._headers)

    @staticmethod
    def _content(response: httpx.Response) -> Any:
        packed = "msgpack" in response.headers.get("content-type", "")
        try:
            content = (msgspec.msgpack if packed else msgspec.json).decode(response.content)
        except msgspec.DecodeError:
            content = None
        if response.is_success and content is not None:
            return content
        error = content.get("error") if isinstance(content, dict) else None
        if not isinstance(error, dict):
            error = {"field": "server", "reason": str(error or response.text[:200] or response.reason_phrase)}
        raise AprilError(response.status_code, error.get("field", "server"), error.get("reason", str(error)))


def event(line: str) -> RolloutGroup | RolloutSummary:
    """One line of a stream; the error event raises."""
    said = msgspec.json.decode(line)
    if said["event"] == "error":
        raise AprilError(500, said["error"]["field"], said["error"]["reason"])
    return read_event(said)


def left_open(error: BaseException) -> PushLeftOpenError:
    return PushLeftOpenError(
        f"the push failed and is still open ({error!r}): the server answers new rounds with 503 until a push succeeds"
    )
