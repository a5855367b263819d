"""The end of a server by SIGTERM: rounds end, and what a restart can use is stored."""

import asyncio

from sglang_april.api import messages
from sglang_april.api.errors import SHUTDOWN, RequestError
from sglang_april.http.service import AprilService

POLL_S = 0.05
ENDS = "the server is shutting down"
REOPENS = ENDS + "; after a restart with its journal this round is open again"


async def shut_down(april: AprilService) -> None:
    """Suspend all samples, answer open rounds with 503, and wait until every copy to the disk has ended.

    KV is stored only for a journal, because a start without one removes all files.
    """
    config = april.config
    april.closing = ENDS
    store = config.journal is not None and config.disk_dir is not None
    reason = REOPENS if config.journal is not None else ENDS
    command = messages.Shutdown(april.rpc.number(), store)
    await april.rpc.call(command, accepted=lambda _: _end_rounds(april, reason))
    while store and (await april.state())["store"]["in_flight"]:
        await asyncio.sleep(POLL_S)


def _end_rounds(april: AprilService, reason: str) -> None:
    """Fail open rounds with 503; rounds whose reply was fixed before keep it."""
    for round_ in [r for r in april.rounds.open if r.state == "open"]:
        april.rounds.mark_ended(round_)
        april.rounds.fail(round_, RequestError(503, SHUTDOWN, reason))
