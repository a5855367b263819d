"""Rounds over several fake engines, for tests."""

from typing import Any

from sglang_april.client import AprilError
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.bridge.fake_engine_pool import FakePoolEngine


def engine_pool(count: int = 2) -> tuple[EnginePool, list[FakePoolEngine]]:
    engines = [FakePoolEngine() for _ in range(count)]
    return EnginePool(engines), engines  # type: ignore[arg-type]


def request(round_id: str, names: str, quota: int | None, **fields: Any) -> dict[str, Any]:
    """Prompts are named like `a3 b1`: a letter for the engine, and a number."""
    prompts = [{"id": name, "engine": "abc".index(name[0]), "n": 2} for name in names.split()]
    body = {"run": "r", "round_id": round_id, "prompts": prompts, "quota": quota}
    return {**body, "count": "finished", "previews": True, **fields}


def run_round(pool: EnginePool, body: dict[str, Any]) -> RolloutSummary:
    """The summary of a round. Checks that all delivered groups were streamed before."""
    events = list(pool.stream(**body))
    summary = events.pop()
    assert isinstance(summary, RolloutSummary)
    assert {named["id"] for named in summary.delivered} <= {
        event.id for event in events if isinstance(event, RolloutGroup)
    }
    return summary


def delivered_ids(summary: RolloutSummary) -> list[str]:
    return [named["id"] for named in summary.delivered]


def refuse(*_arguments: Any, **_fields: Any) -> None:
    raise AprilError(0, "server", "lost")
