"""Commands to the scheduler and their answers, matched by `seq`."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from sglang_april.api import messages
from sglang_april.api.errors import RequestError

Accepted = Callable[[messages.Answer], None]


class SchedulerRpc:
    """Sends commands and waits for answers, without a timeout: an answer may have to wait for a long prefill."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[messages.Answer], Accepted | None]] = {}

    def number(self) -> int:
        """The `seq` of a new command."""
        return next(self._numbers)

    async def call(self, command: messages.Command, accepted: Accepted | None = None) -> messages.Answer:
        """The answer to a command. `accepted` runs as soon as a 200 arrives, before any later message is handled.

        Raises:
            RequestError: its status is not 200.
        """
        future: asyncio.Future[messages.Answer] = asyncio.get_running_loop().create_future()
        self._waiting[command.seq] = future, accepted
        try:
            await self._send(messages.encode(command))
            answer = await future
        finally:
            self._waiting.pop(command.seq, None)
        if answer.status != 200:
            raise RequestError(answer.status, answer.field or "server", answer.reason)
        return answer

    def answered(self, answer: messages.Answer) -> None:
        """Complete the call that waits for this answer, if it has not been cancelled."""
        future, accepted = self._waiting.pop(answer.seq, (None, None))
        if accepted is not None and answer.status == 200:
            accepted(answer)
        if future is not None and not future.done():
            future.set_result(answer)
