"""The Python client, synchronous and asynchronous: one method per route, numpy arrays for ids and logprobs.

    with AprilClient("http://localhost:30000") as client:
        reply = client.rollout(prompts=[{"id": "p0", "text": "1+1=", "n": 8}], quota=1)
        with client.push():
            ...  # SGLang's own weight calls

Both clients check at their first call that the server is patched (S11): `GET /april/state` must answer.
"""

from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self, TypeVar

import httpx
import msgspec

from sglang_april.replies import Group, Reply, Summary, read_event, read_reply

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


class _Calls:
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

    def _rollout(self, body: Mapping[str, Any]) -> Step[Reply]:
        return read_reply((yield from self._call("POST", "/april/rollout", body)))

    def _get_round(self, round_id: str) -> Step[Reply | None]:
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


class AprilClient(_Calls):
    """The synchronous client. `timeout` in seconds bounds connecting only: a round takes as long as it takes."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 10.0, **options: Any) -> None:
        super().__init__(url, api_key)
        self._http = httpx.Client(timeout=httpx.Timeout(None, connect=timeout), **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _run(self, step: Step[T]) -> T:
        try:
            request = next(step)
            while True:
                request = step.send(self._http.send(request))
        except StopIteration as done:
            return done.value

    def rollout(self, **body: Any) -> Reply:
        """`POST /april/rollout`: open a round and wait for its reply. The fields are those of the request."""
        return self._run(self._rollout(body))

    def stream(self, **body: Any) -> Iterator[Group | Summary]:
        """The same with `stream: true`: each group as it finishes, and at last the summary."""
        self._run(self._check())
        request = self._request("POST", "/april/rollout", {**body, "stream": True}, {})
        response = self._http.send(request, stream=True)
        try:
            if not response.is_success:
                response.read()
                self._content(response)
            for line in response.iter_lines():
                yield _event(line)
        finally:
            response.close()

    def get_round(self, round_id: str) -> Reply | None:
        """`GET /april/rounds/{id}`: its reply, or None while it is open."""
        return self._run(self._get_round(round_id))

    def stop(self, round_id: str, deliver: list[str] | None = None) -> dict[str, Any]:
        """End a round now, with what has finished, or with the groups named."""
        return self._run(self._call("POST", f"/april/rounds/{round_id}/stop", {"deliver": deliver}))

    def judge(self, round_id: str, accept: Iterable[str] = (), reject: Iterable[str] = ()) -> dict[str, Any]:
        """Accept and reject finished groups of an open round with `count: accepted`, by prompt id."""
        body = {"accept": list(accept), "reject": list(reject)}
        return self._run(self._call("POST", f"/april/rounds/{round_id}/judge", body))

    def extend(self, round_id: str, quota_add: int = 0, prompts: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Raise the quota of an open round and hand it more prompts."""
        body = {"quota_add": quota_add, "prompts": list(prompts)}
        return self._run(self._call("POST", f"/april/rounds/{round_id}/extend", body))

    def ack(self, round_id: str) -> dict[str, Any]:
        """The reply need not be kept any longer."""
        return self._run(self._call("POST", f"/april/rounds/{round_id}/ack", {}))

    def push_begin(self, version: int | None = None) -> dict[str, Any]:
        """The weights of one policy begin to arrive."""
        return self._run(self._call("POST", "/april/push/begin", {"version": version}))

    def push_end(self, version: int | None = None) -> dict[str, Any]:
        """They have all arrived."""
        return self._run(self._call("POST", "/april/push/end", {"version": version}))

    @contextmanager
    def push(self, version: int | None = None) -> Iterator[None]:
        """One push around SGLang's weight calls. If the body fails the push stays open, for the weights are mixed."""
        self.push_begin(version)
        try:
            yield
        except BaseException as error:
            raise _left_open(error) from error
        self.push_end(version)

    def state(self) -> dict[str, Any]:
        """`GET /april/state`."""
        return self._run(self._call("GET", "/april/state"))

    def partials(self, run: str | None = None) -> dict[str, Any]:
        """The suspended samples of a run, or of all."""
        return self._run(self._call("GET", "/april/partials", run=run))

    def drop(self, run: str, ids: list[str] | None = None) -> dict[str, Any]:
        """Delete undelivered groups of a run, or all of them."""
        return self._run(self._call("POST", "/april/drop", {"run": run, "ids": ids}))


class AsyncAprilClient(_Calls):
    """The asynchronous client; the same calls."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 10.0, **options: Any) -> None:
        super().__init__(url, api_key)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=timeout), **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _run(self, step: Step[T]) -> T:
        try:
            request = next(step)
            while True:
                request = step.send(await self._http.send(request))
        except StopIteration as done:
            return done.value

    async def rollout(self, **body: Any) -> Reply:
        """`POST /april/rollout`: open a round and wait for its reply. The fields are those of the request."""
        return await self._run(self._rollout(body))

    async def stream(self, **body: Any) -> AsyncIterator[Group | Summary]:
        """The same with `stream: true`: each group as it finishes, and at last the summary."""
        await self._run(self._check())
        request = self._request("POST", "/april/rollout", {**body, "stream": True}, {})
        response = await self._http.send(request, stream=True)
        try:
            if not response.is_success:
                await response.aread()
                self._content(response)
            async for line in response.aiter_lines():
                yield _event(line)
        finally:
            await response.aclose()

    async def get_round(self, round_id: str) -> Reply | None:
        """`GET /april/rounds/{id}`: its reply, or None while it is open."""
        return await self._run(self._get_round(round_id))

    async def stop(self, round_id: str, deliver: list[str] | None = None) -> dict[str, Any]:
        """End a round now, with what has finished, or with the groups named."""
        return await self._run(self._call("POST", f"/april/rounds/{round_id}/stop", {"deliver": deliver}))

    async def judge(self, round_id: str, accept: Iterable[str] = (), reject: Iterable[str] = ()) -> dict[str, Any]:
        """Accept and reject finished groups of an open round with `count: accepted`, by prompt id."""
        body = {"accept": list(accept), "reject": list(reject)}
        return await self._run(self._call("POST", f"/april/rounds/{round_id}/judge", body))

    async def extend(
        self, round_id: str, quota_add: int = 0, prompts: Iterable[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Raise the quota of an open round and hand it more prompts."""
        body = {"quota_add": quota_add, "prompts": list(prompts)}
        return await self._run(self._call("POST", f"/april/rounds/{round_id}/extend", body))

    async def ack(self, round_id: str) -> dict[str, Any]:
        """The reply need not be kept any longer."""
        return await self._run(self._call("POST", f"/april/rounds/{round_id}/ack", {}))

    async def push_begin(self, version: int | None = None) -> dict[str, Any]:
        """The weights of one policy begin to arrive."""
        return await self._run(self._call("POST", "/april/push/begin", {"version": version}))

    async def push_end(self, version: int | None = None) -> dict[str, Any]:
        """They have all arrived."""
        return await self._run(self._call("POST", "/april/push/end", {"version": version}))

    @asynccontextmanager
    async def push(self, version: int | None = None) -> AsyncIterator[None]:
        """One push around SGLang's weight calls. If the body fails the push stays open, for the weights are mixed."""
        await self.push_begin(version)
        try:
            yield
        except BaseException as error:
            raise _left_open(error) from error
        await self.push_end(version)

    async def state(self) -> dict[str, Any]:
        """`GET /april/state`."""
        return await self._run(self._call("GET", "/april/state"))

    async def partials(self, run: str | None = None) -> dict[str, Any]:
        """The suspended samples of a run, or of all."""
        return await self._run(self._call("GET", "/april/partials", run=run))

    async def drop(self, run: str, ids: list[str] | None = None) -> dict[str, Any]:
        """Delete undelivered groups of a run, or all of them."""
        return await self._run(self._call("POST", "/april/drop", {"run": run, "ids": ids}))


def _event(line: str) -> Group | Summary:
    """One line of a stream; the error event raises."""
    event = msgspec.json.decode(line)
    if event["event"] == "error":
        raise AprilError(500, event["error"]["field"], event["error"]["reason"])
    return read_event(event)


def _left_open(error: BaseException) -> PushLeftOpenError:
    return PushLeftOpenError(
        f"the push failed and is still open ({error!r}): the server answers new rounds with 503 until a push succeeds"
    )
