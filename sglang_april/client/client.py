"""The Python client, synchronous and asynchronous: one method per route, numpy arrays for ids and logprobs.

    with AprilClient("http://localhost:30000") as client:
        reply = client.rollout(prompts=[{"id": "p0", "text": "1+1=", "n": 8}], quota=1)
        with client.push():
            ...  # SGLang's own weight calls

At its first call a client checks that the plugin is active on the server: `GET /april/state` must answer.
"""

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Concatenate, ParamSpec, Self

import httpx

from sglang_april.client.calls import Calls, Exchange, T, push_stays_open
from sglang_april.client.keep_alive import with_keep_alive
from sglang_april.client.retries import LOST, Retries
from sglang_april.client.streamed_round import StreamedRound, async_lines_of, event, lines_of
from sglang_april.client.types import RolloutGroup, RolloutSummary

P = ParamSpec("P")
Call = Callable[Concatenate[Calls, P], Exchange[T]]


def _described(method: Callable[..., Any], call: Callable[..., Any]) -> None:
    """Give a method the name, docstring and signature of its call; it returns the result instead of an `Exchange`."""
    functools.update_wrapper(method, call)
    signature = inspect.signature(call)
    result = signature.return_annotation.__args__[-1]
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    method.__annotations__ = {**call.__annotations__, "return": result}


def _blocking(call: Call[P, T]) -> Callable[Concatenate["AprilClient", P], T]:
    def method(self: "AprilClient", *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(call(self._calls, *args, **kwargs))

    _described(method, call)
    return method


def _awaitable(call: Call[P, T]) -> Callable[Concatenate["AsyncAprilClient", P], Coroutine[Any, Any, T]]:
    async def method(self: "AsyncAprilClient", *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(call(self._calls, *args, **kwargs))

    _described(method, call)
    return method


def _with_options(client: httpx.Client | httpx.AsyncClient, request: httpx.Request) -> httpx.Request:
    """The request with the headers, cookies and parameters that the client was given."""
    return client.build_request(
        request.method, request.url, content=request.content, headers=request.headers, extensions=request.extensions
    )


class AprilClient:
    """The synchronous client.

    Args:
        url: base URL of the server.
        api_key: sent as a bearer token.
        timeout: seconds that connecting may take. Answers have no time limit, because a round may be long. A machine
            that no longer answers TCP keep-alive probes counts as lost after a minute (`keep_alive.py`).
        retry_s: seconds after the loss of a connection, or a refusal by a server that is shutting down, for which the
            call is repeated, unless its effect could happen twice. With a journal, a round thus survives a restart of
            the server. 0: both are errors at once.
        options: of `httpx.Client`.
    """

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float = 10.0, retry_s: float = 0.0, **options: Any
    ) -> None:
        self._calls = Calls(url, api_key, retry_s)
        options = with_keep_alive(httpx.HTTPTransport, self._calls.url, options)
        self._http = httpx.Client(timeout=httpx.Timeout(None, connect=timeout), **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _run(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                request = exchange.send(self._send(request))
        except StopIteration as done:
            return done.value

    def _send(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        request = _with_options(self._http, request)
        retries = Retries(self._calls, request)
        while True:
            retries.sending()
            try:
                response = self._http.send(request, stream=stream)
                if not response.is_success:
                    response.read()
                    self._calls.check_not_shutting_down(response)
                return response
            except LOST as error:
                time.sleep(retries.wait_s(error))

    rollout = _blocking(Calls.rollout)
    get_round = _blocking(Calls.get_round)
    stop = _blocking(Calls.stop)
    judge = _blocking(Calls.judge)
    extend = _blocking(Calls.extend)
    ack = _blocking(Calls.ack)
    done = _blocking(Calls.done)
    trajectory = _blocking(Calls.trajectory)
    push_begin = _blocking(Calls.push_begin)
    push_end = _blocking(Calls.push_end)
    state = _blocking(Calls.state)
    check = _blocking(Calls.check)
    partials = _blocking(Calls.partials)
    drop = _blocking(Calls.drop)
    ack_audit = _blocking(Calls.ack_audit)

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        """`rollout` with `stream: true`: the delivered groups one by one, and the summary last.

        With `previews=True`, and with `count="accepted"`, each group comes as it finishes, with `delivered` False,
        because it may be carried to the next round. All delivered groups are in the summary's `groups`: train on these.
        The round is open when this returns. With `retry_s`, a broken stream is continued without repeating samples.

        Raises:
            RoundLostError: the stream broke, and the server was restarted without the journal of this round.
        """
        self._run(self._calls.check_patched())
        first, continued = self._calls.stream_requests(body)
        return self._events(continued, self._open_stream(first))

    def _open_stream(self, request: httpx.Request) -> httpx.Response:
        while True:
            response = self._send(request, stream=True)
            if self._calls.is_open(response):
                return response

    def _events(self, continued: httpx.Request, response: httpx.Response) -> Iterator[RolloutGroup | RolloutSummary]:
        streamed = StreamedRound()
        while True:
            try:
                with contextlib.closing(response):
                    for line in lines_of(response):
                        if (received := event(line)) and (new := streamed.new(received)):
                            yield new
                return
            except LOST as error:
                time.sleep(Retries(self._calls, continued).wait_s(error))
            response = self._open_stream(continued)

    @contextmanager
    def push(self, version: int | None = None) -> Iterator[None]:
        """One push around SGLang's weight calls. If the body fails, the push stays open: the weights are mixed."""
        self.push_begin(version)
        with push_stays_open():
            yield
        self.push_end(version)


class AsyncAprilClient:
    """The asynchronous client: the same calls and arguments as `AprilClient`."""

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float = 10.0, retry_s: float = 0.0, **options: Any
    ) -> None:
        self._calls = Calls(url, api_key, retry_s)
        options = with_keep_alive(httpx.AsyncHTTPTransport, self._calls.url, options)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=timeout), **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _run(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                request = exchange.send(await self._send(request))
        except StopIteration as done:
            return done.value

    async def _send(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        request = _with_options(self._http, request)
        retries = Retries(self._calls, request)
        while True:
            retries.sending()
            try:
                response = await self._http.send(request, stream=stream)
                if not response.is_success:
                    await response.aread()
                    self._calls.check_not_shutting_down(response)
                return response
            except LOST as error:
                await asyncio.sleep(retries.wait_s(error))

    rollout = _awaitable(Calls.rollout)
    get_round = _awaitable(Calls.get_round)
    stop = _awaitable(Calls.stop)
    judge = _awaitable(Calls.judge)
    extend = _awaitable(Calls.extend)
    ack = _awaitable(Calls.ack)
    done = _awaitable(Calls.done)
    trajectory = _awaitable(Calls.trajectory)
    push_begin = _awaitable(Calls.push_begin)
    push_end = _awaitable(Calls.push_end)
    state = _awaitable(Calls.state)
    check = _awaitable(Calls.check)
    partials = _awaitable(Calls.partials)
    drop = _awaitable(Calls.drop)
    ack_audit = _awaitable(Calls.ack_audit)

    async def stream(self, **body: Any) -> AsyncIterator[RolloutGroup | RolloutSummary]:
        """As `AprilClient.stream`; the round is open when the first event arrives."""
        await self._run(self._calls.check_patched())
        (request, continued), streamed = self._calls.stream_requests(body), StreamedRound()
        while True:
            response = await self._send(request, stream=True)
            try:
                if not self._calls.is_open(response):
                    continue
                request = continued
                async for line in async_lines_of(response):
                    if (received := event(line)) and (new := streamed.new(received)):
                        yield new
                return
            except LOST as error:
                await asyncio.sleep(Retries(self._calls, request).wait_s(error))
            finally:
                await response.aclose()

    @asynccontextmanager
    async def push(self, version: int | None = None) -> AsyncIterator[None]:
        """One push around SGLang's weight calls. If the body fails, the push stays open: the weights are mixed."""
        await self.push_begin(version)
        with push_stays_open():
            yield
        await self.push_end(version)
