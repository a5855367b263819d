"""Rounds before a restart, and what the journal restores of them, for tests of the HTTP process."""

from typing import Any

from sglang_april.api import messages
from sglang_april.http.service import AprilService
from tests.unit.http_app import client_of, open_round
from tests.unit.scripted_engine import ScriptedEngine, prompt, service

BODY: dict[str, Any] = {"run": "r", "round_id": "open", "prompts": [prompt(id="late", text="x", input_ids=None)]}


async def run_rounds(
    april: AprilService, engine: ScriptedEngine, *rounds: str, **body: Any
) -> dict[str, tuple[Any, bytes]]:
    """Run rounds of one group each; returns the command and the reply of each."""
    lived = {}
    async with client_of(april) as client:
        for name in rounds:
            requested = {
                "run": "r",
                "round_id": name,
                "prompts": [prompt(id=f"p-{name}", text="hello", input_ids=None)],
            }
            task = await open_round(client, engine, **requested, **body)
            opened = engine.opened
            engine.finish(opened, (f"p-{name}", 0))
            engine.end(opened, (f"p-{name}", [0]))
            lived[name] = opened, (await task).content
    return lived


def kept(engine: ScriptedEngine, opened: messages.OpenRound) -> messages.KeptReply:
    """A reply as the journal has it."""
    name = opened.prompts[0].id
    ended = messages.RoundEnded(
        opened.spec.round_id, opened.spec.run, 0, "quota", [messages.Delivery(name, 0, [0], True)], {}, {}
    )
    ended.carried = {"groups": 0, "samples": 0, "tokens": 0, "bytes": {"device": 0, "host": 0}}
    ended.stats = {"tokens_after_quota": 0, "warnings": []}
    return messages.KeptReply(opened.spec, ended, opened.prompts, [engine.sample(opened, name, 0, "ab", True)])


def restored(**fields: Any) -> messages.Restored:
    empty: dict[str, Any] = {
        "groups": [],
        "unjudged": [],
        "finished": [],
        "rounds": [],
        "replies": [],
        "gone": [],
        "warnings": [],
    }
    return messages.Restored(**{**empty, "unnamed": False, **fields})


def with_journal(**settings: Any) -> tuple[AprilService, ScriptedEngine]:
    return service(journal="/journal", **settings)


def reported() -> tuple[AprilService, ScriptedEngine]:
    april, engine = with_journal()
    engine.emit(restored())
    return april, engine


async def before(*names: str) -> tuple[dict[str, tuple[Any, bytes]], messages.OpenRound]:
    """The replies of a first server, and the round that was open when it died."""
    april, engine = reported()
    lived = await run_rounds(april, engine, *names)
    async with client_of(april) as client:
        task = await open_round(client, engine, **BODY)
        task.cancel()
    return lived, engine.opened
