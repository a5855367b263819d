"""The answer of a leg follows its record in the journal."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_april.adapter.core import hooks_attached
from sglang_april.adapter.core.attach_request import Attachment
from sglang_april.api.messages import FinishedSample, JournalFault, LegEnded, Span
from sglang_april.http import attached
from tests.unit.scripted_engine import service


def test_a_leg_is_not_answered_while_its_record_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "LIMIT_S", 0.01)

    async def scenario() -> None:
        april, engine = service()
        manager: Any = SimpleNamespace(april=april, auto_create_handle_loop=lambda: None)

        async def answers() -> AsyncIterator[Any]:
            yield {"meta_info": {"id": "leg", "finish_reason": {"type": "length"}}}

        async def answer(trajectory: str | None) -> dict[str, Any]:
            stream = hooks_attached._answers(answers(), manager, Attachment("run", trajectory), {})
            return (await anext(stream))["meta_info"]["april"]

        engine.emit(JournalFault("the disk is full"))
        assert "spans" not in await answer(None), "it is no leg, and has no record"
        waiting = asyncio.ensure_future(answer("t"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        engine.emit(JournalFault(""))
        result = FinishedSample("run", "p", 0, 0, b"\0" * 8, b"\0" * 8, [Span(0, 2, 3, "kept")], {"type": "length"}, 7)
        engine.emit(LegEnded("run", "t", "t", 0, "leg", None, 0, b"", 0, result, policy_version=4))
        assert (await waiting)["spans"][0]["version"] == 3

    asyncio.run(scenario())
