"""Every call of the client, independent of the transport: its requests, how its answer is read, and the errors."""

import logging
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from sglang_april import PROTOCOL, __version__
from sglang_april.api.errors import JOURNAL, SHUTDOWN
from sglang_april.client.types import RecordedTrajectory, RolloutReply, read_reply, read_trajectory

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}
T = TypeVar("T")
log = logging.getLogger("sglang_april")

Exchange = Generator[httpx.Request, httpx.Response, T]
"""A call as a generator: it yields requests, is sent their responses, and returns the result."""


class AprilError(Exception):
    """An error reply of the server: `status` (HTTP; 0 without a reply), `field` and `reason`."""

    def __init__(self, status: int, field: str, reason: str) -> None:
        super().__init__(f"{status} {field}: {reason}" if status else reason)
        self.status, self.field, self.reason = status, field, reason


class NotPatchedError(AprilError):
    """The server is plain SGLang, or has a plugin whose protocol is another."""


class ServerLostError(AprilError):
    """The server cannot be reached, is shutting down (`status` 503), or the connection failed before its answer was
    complete (`status` 0)."""


class RoundLostError(AprilError):
    """The server has no round of this id (`status` 404): it never had it, or was restarted without its journal."""


class PushLeftOpenError(RuntimeError):
    """A push failed between begin and end: the server opens no rounds until a push succeeds."""


class Calls:
    """One generator per call. `AprilClient` and `AsyncAprilClient` run them on their transports."""

    def __init__(self, url: str, api_key: str | None, retry_s: float) -> None:
        self.url, self.retry_s = with_scheme(url).rstrip("/"), retry_s
        self._headers = {**MSGPACK, **({"authorization": f"Bearer {api_key}"} if api_key else {})}
        self._checked = False

    def rollout(self, **body: Any) -> Exchange[RolloutReply]:
        """`POST /april/rollout`: open a round and wait for its reply. The fields are those of the request.

        Without a `round_id` the client makes one, so that a call that is repeated after a lost connection finds its
        round. While the server's journal cannot be written, its reason is logged and the call keeps waiting.

        Raises:
            AprilError: the server refused the round.
            ServerLostError: the server was lost, or is shutting down; the message contains the `round_id`.
        """
        body = with_round_id(body)
        while True:
            try:
                return read_reply((yield from self._call("POST", "/april/rollout", body)))
            except AprilError as error:
                if not waits_for_journal(error):
                    raise

    def get_round(self, round_id: str) -> Exchange[RolloutReply | None]:
        """`GET /april/rounds/{id}`: its reply, or None while it is open."""
        yield from self.check_patched()
        response = yield self._request("GET", f"/april/rounds/{round_id}")
        content = self.content(response)
        return None if response.status_code == 202 else read_reply(content)

    def stop(self, round_id: str, deliver: list[str] | None = None) -> Exchange[dict[str, Any]]:
        """End a round now, with what has finished, or with the groups named."""
        return (yield from self._call("POST", f"/april/rounds/{round_id}/stop", {"deliver": deliver}))

    def judge(self, round_id: str, accept: Iterable[str] = (), reject: Iterable[str] = ()) -> Exchange[dict[str, Any]]:
        """Accept and reject finished groups of an open round with `count: accepted`, by prompt id."""
        body = {"accept": list(accept), "reject": list(reject)}
        return (yield from self._call("POST", f"/april/rounds/{round_id}/judge", body))

    def extend(
        self,
        round_id: str,
        quota_add: int = 0,
        prompts: Iterable[Mapping[str, Any]] = (),
        idempotency_key: str | None = None,
    ) -> Exchange[dict[str, Any]]:
        """Raise the quota of an open round and add prompts to it.

        Without an `idempotency_key` the client makes one, so that a call that is repeated after a lost connection
        extends the round once.
        """
        key = idempotency_key or uuid.uuid4().hex
        body = {"quota_add": quota_add, "prompts": list(prompts), "idempotency_key": key}
        return (yield from self._call("POST", f"/april/rounds/{round_id}/extend", body))

    def ack(self, round_id: str) -> Exchange[dict[str, Any]]:
        """Acknowledge a reply: the server need not keep it any longer."""
        return (yield from self._call("POST", f"/april/rounds/{round_id}/ack", {}))

    def done(
        self, run: str, trajectories: Mapping[str, Mapping[str, Any]] | None = None, reject: Iterable[str] = ()
    ) -> Exchange[dict[str, Any]]:
        """End trajectories of a run, with their `reward` and `metadata`, and delete those of `reject`.

        A call that is repeated changes nothing.
        """
        body = {"run": run, "trajectories": dict(trajectories or {}), "reject": list(reject)}
        return (yield from self._call("POST", "/april/trajectories/done", body))

    def trajectory(self, trajectory_id: str, run: str) -> Exchange[RecordedTrajectory]:
        """The record of a trajectory that has not been delivered, with the legs that have ended."""
        path = f"/april/trajectories/{quote(trajectory_id, safe='')}"
        return read_trajectory((yield from self._call("GET", path, run=run)))

    def push_begin(self, version: int | None = None) -> Exchange[dict[str, Any]]:
        """Announce that the weights of one policy will arrive."""
        return (yield from self._call("POST", "/april/push/begin", {"version": version}))

    def push_end(self, version: int | None = None) -> Exchange[dict[str, Any]]:
        """Announce that all weights of the policy have arrived."""
        return (yield from self._call("POST", "/april/push/end", {"version": version}))

    def state(self) -> Exchange[dict[str, Any]]:
        """`GET /april/state`."""
        return (yield from self._call("GET", "/april/state"))

    def check(self) -> Exchange[dict[str, Any]]:
        """Verify every stored page on every rank, and the pool accounting: `ok` and `problem`."""
        return (yield from self._call("GET", "/april/check"))

    def partials(self, run: str | None = None) -> Exchange[dict[str, Any]]:
        """The suspended samples of a run, or of all runs, and the groups that have not begun."""
        return (yield from self._call("GET", "/april/partials", run=run))

    def drop(self, run: str, ids: list[str] | None = None) -> Exchange[dict[str, Any]]:
        """Delete undelivered groups of a run, or all of them."""
        return (yield from self._call("POST", "/april/drop", {"run": run, "ids": ids}))

    def ack_audit(self) -> Exchange[dict[str, Any]]:
        """Acknowledge the audit's findings, so that rounds may open again."""
        return (yield from self._call("POST", "/april/audit/ack", {}))

    # --- parts of calls

    def stream_requests(self, body: Mapping[str, Any]) -> tuple[httpx.Request, httpx.Request]:
        """The request of a streamed rollout, and the one that continues a broken stream.

        The second one opens no round: a server that has lost the round would open it anew, and wait for verdicts on
        groups that the caller has had.
        """
        body = {**with_round_id(body), "stream": True}
        previews = "true" if body.get("previews") else None
        continued = self._request("GET", f"/april/rounds/{body['round_id']}", stream="true", previews=previews)
        first = self._request("POST", "/april/rollout", body)
        continued.extensions |= first.extensions
        return first, continued

    def is_open(self, response: httpx.Response) -> bool:
        """Whether a streamed round is open. If not, it waits for the server's journal: send the request again.

        Raises:
            AprilError: the server refused the round.
            RoundLostError: a stream is to be continued of a round that the server has lost.
        """
        if response.is_success:
            return True
        try:
            self.content(response)
        except AprilError as error:
            if not waits_for_journal(error):
                raise
        return False

    def check_patched(self) -> Exchange[None]:
        """Before the first call: `GET /april/state` must answer (`explicit-activation`).

        Raises:
            NotPatchedError: the server runs without the plugin.
        """
        if self._checked:
            return
        response = yield self._request("GET", "/april/state")
        if response.status_code == 404:
            reason = "the server runs SGLang without sglang-april; launch it with python -m sglang_april.launch_server"
            raise NotPatchedError(404, "server", f"{self.url}: {reason}")
        hooks = self.content(response)["http"]["hooks"]
        if not hooks:
            raise NotPatchedError(500, "server", f"{self.url}: the server runs SGLang without the plugin's hooks")
        if hooks.get("protocol") != PROTOCOL:
            versions = f"the server has sglang-april {hooks.get('april')} (protocol {hooks.get('protocol')})"
            raise NotPatchedError(
                500, "server", f"{self.url}: {versions}, the client {__version__} (protocol {PROTOCOL})"
            )
        self._checked = True

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Exchange[Any]:
        """One request and its decoded answer."""
        yield from self.check_patched()
        return self.content((yield self._request(method, path, body, **query)))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> httpx.Request:
        given = {name: value for name, value in query.items() if value is not None}
        content = None if body is None else msgspec.msgpack.encode(body)
        extensions = {"round_id": body["round_id"]} if body and "round_id" in body else {}
        return httpx.Request(
            method,
            self.url + path,
            params=given or None,
            content=content,
            headers=self._headers,
            extensions=extensions,
        )

    @staticmethod
    def content(response: httpx.Response) -> Any:
        """The decoded body of a response.

        Raises:
            AprilError: the status is an error.
        """
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
        raise as_error(response.status_code, error)

    def check_not_shutting_down(self, response: httpx.Response) -> None:
        """Check the response for the refusal of a server that is shutting down; ignore other errors.

        Raises:
            ServerLostError: the server is shutting down.
        """
        try:
            self.content(response)
        except ServerLostError:
            raise
        except AprilError:
            return


def as_error(status: int, error: Mapping[str, Any]) -> AprilError:
    """The exception for an error reply, or for the error event of a stream."""
    field, reason = error.get("field", "server"), error.get("reason", str(error))
    kinds = {(503, SHUTDOWN): ServerLostError, (404, "round_id"): RoundLostError}
    return kinds.get((status, field), AprilError)(status, field, reason)


def with_scheme(url: str) -> str:
    """The URL of a server, which may be written as `host:port`, as for curl."""
    return url if "://" in url else f"http://{url}"


def with_round_id(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a round, with a new `round_id` if it has none."""
    return {**body, "round_id": body.get("round_id") or uuid.uuid4().hex}


def waits_for_journal(error: AprilError) -> bool:
    """Whether the round continues and its answer waits until the server's journal can be written; logs why."""
    waits = (error.status, error.field) == (503, JOURNAL)
    if waits:
        log.warning("still waiting: %s", error.reason)
    return waits


@contextmanager
def push_stays_open() -> Iterator[None]:
    """Around the weight calls of a push: a failure names the push that it leaves open."""
    try:
        yield
    except Exception as error:
        raise _left_open(error) from error
    except BaseException as error:  # a cancellation or interrupt keeps its type for its handler
        error.add_note(str(_left_open(error)))
        raise


def _left_open(error: BaseException) -> PushLeftOpenError:
    return PushLeftOpenError(
        f"the push failed and is still open ({error!r}): the server answers new rounds with 503 until a push succeeds"
    )
