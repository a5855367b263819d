"""The Python client, synchronous and asynchronous: one method per route, numpy arrays for ids and logprobs.

    with AprilClient("http://localhost:30000") as client:
        reply = client.rollout(prompts=[{"id": "p0", "text": "1+1=", "n": 8}], quota=1)
        with client.push():
            ...  # SGLang's own weight calls

Both clients check at their first call that the server is patched (`explicit-activation`): `GET /april/state` must
answer.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import httpx

from sglang_april.client.calls import AprilError, Calls, NotPatchedError, PushLeftOpenError, Step, T, event, left_open
from sglang_april.client.types import RolloutGroup, RolloutReply, RolloutSummary

__all__ = ["AprilClient", "AprilError", "AsyncAprilClient", "NotPatchedError", "PushLeftOpenError"]


class AprilClient(Calls):
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

    def rollout(self, **body: Any) -> RolloutReply:
        """`POST /april/rollout`: open a round and wait for its reply. The fields are those of the request."""
        return self._run(self._rollout(body))

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        """The same with `stream: true`: each group as it finishes, and at last the summary.

        The round is open when this returns.
        """
        self._run(self._check())
        request = self._request("POST", "/april/rollout", {**body, "stream": True}, {})
        response = self._http.send(request, stream=True)
        if not response.is_success:
            response.read()
            self._content(response)
        return _events(response)

    def get_round(self, round_id: str) -> RolloutReply | None:
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
        except Exception as error:
            raise left_open(error) from error
        except BaseException as error:  # cancelled, interrupted: whoever waits for just that must see it
            error.add_note(str(left_open(error)))
            raise
        self.push_end(version)

    def state(self) -> dict[str, Any]:
        """`GET /april/state`."""
        return self._run(self._call("GET", "/april/state"))

    def partials(self, run: str | None = None) -> dict[str, Any]:
        """The suspended samples of a run, or of all, and its groups that have not begun."""
        return self._run(self._call("GET", "/april/partials", run=run))

    def drop(self, run: str, ids: list[str] | None = None) -> dict[str, Any]:
        """Delete undelivered groups of a run, or all of them."""
        return self._run(self._call("POST", "/april/drop", {"run": run, "ids": ids}))


def _events(response: httpx.Response) -> Iterator[RolloutGroup | RolloutSummary]:
    try:
        for line in response.iter_lines():
            yield event(line)
    finally:
        response.close()


class AsyncAprilClient(Calls):
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

    async def rollout(self, **body: Any) -> RolloutReply:
        """`POST /april/rollout`: open a round and wait for its reply. The fields are those of the request."""
        return await self._run(self._rollout(body))

    async def stream(self, **body: Any) -> AsyncIterator[RolloutGroup | RolloutSummary]:
        """The same with `stream: true`: each group as it finishes, and at last the summary."""
        await self._run(self._check())
        request = self._request("POST", "/april/rollout", {**body, "stream": True}, {})
        response = await self._http.send(request, stream=True)
        try:
            if not response.is_success:
                await response.aread()
                self._content(response)
            async for line in response.aiter_lines():
                yield event(line)
        finally:
            await response.aclose()

    async def get_round(self, round_id: str) -> RolloutReply | None:
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
        except Exception as error:
            raise left_open(error) from error
        except BaseException as error:  # cancelled, interrupted: whoever waits for just that must see it
            error.add_note(str(left_open(error)))
            raise
        await self.push_end(version)

    async def state(self) -> dict[str, Any]:
        """`GET /april/state`."""
        return await self._run(self._call("GET", "/april/state"))

    async def partials(self, run: str | None = None) -> dict[str, Any]:
        """The suspended samples of a run, or of all, and its groups that have not begun."""
        return await self._run(self._call("GET", "/april/partials", run=run))

    async def drop(self, run: str, ids: list[str] | None = None) -> dict[str, Any]:
        """Delete undelivered groups of a run, or all of them."""
        return await self._run(self._call("POST", "/april/drop", {"run": run, "ids": ids}))
