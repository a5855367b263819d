"""What rounds and pushes add to the Prometheus metrics, and `GET /metrics` as a scrape sees it."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_april.api import messages
from sglang_april.http import observability
from sglang_april.http.reply import Reply, delivery_stats
from sglang_april.metrics import Metrics
from tests.unit.http_app import client_of, open_round, run
from tests.unit.scripted_engine import prompt, service

STATE: dict[str, Any] = {
    "attached": {"agents": {"groups": 2, "samples": 3, "tokens": 40, "finished_tokens": 0}},
    "trajectories": {"agents": {"undelivered": 5, "done": 2, "oldest_staleness": 1, "mismatches": 1}},
    "samples": {"queued": 1, "running": 2, "suspended": 3, "finished": 4},
    "tokens": {"device": 10, "host": 20, "disk": 0, "none": 5},
    "bytes": {"device": 100, "host": 200, "disk": 0, "none": 0},
    "carry_tokens": 35,
    "carry_cap_tokens": 1000,
    "staleness": {"0": 2, "3": 1},
    "rounds": [{}],
    "push_open": False,
    "closed": "",
    "policy_version": 4,
    "journal": {"fault": "", "bytes": 4096, "waiting": 2, "lag_s": 0.5},
}


def samples(text: bytes | str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    decoded = text.decode() if isinstance(text, bytes) else text
    families = text_string_to_metric_families(decoded)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(text: bytes | str, name: str, **labels: str) -> float | None:
    labels = {"model_name": "", **labels}
    return samples(text).get((f"sglang_april:{name}", frozenset(labels.items())))


def test_a_round_is_counted() -> None:
    metrics = Metrics("m")
    stats = {
        "delivered": {
            **delivery_stats([], 4),
            "samples": 3,
            "samples_by_staleness": {"0": 2, "3": 1},
            "tokens_by_kv": {"fresh": 5, "kept": 2, "recomputed": 0},
        },
        "tokens_after_quota": 1,
        "reprefilled_tokens": 7,
        "kv_decisions": {"keep": {"host": 3}, "recompute": {}},
        "duration_s": 20.0,
        "quota_to_built_s": 0.003,
    }
    carried = {
        "groups": 2,
        "samples": 4,
        "tokens": 60,
        "tokens_by_tier": {"device": 80, "host": 0},
        "bytes": {"device": 100, "host": 0},
    }
    for _ in range(2):
        metrics.observe(Reply("r", "run", 4, "quota", [], carried, stats))
    metrics.pushed(2.0)
    text = metrics.exposition(None)
    m = {"model_name": "m"}
    assert value(text, "rounds_total", end_reason="quota", **m) == 2
    assert value(text, "delivered_samples_total", **m) == 6
    assert value(text, "delivered_tokens_total", kv="kept", **m) == 4
    assert value(text, "tokens_after_quota_total", **m) == 2
    assert value(text, "reprefilled_tokens_total", **m) == 14
    assert value(text, "kv_decisions_total", decision="keep", why="host", **m) == 6
    assert value(text, "quota_to_reply_seconds_bucket", le="0.005", **m) == 2
    assert value(text, "round_seconds_sum", **m) == 40
    assert value(text, "push_seconds_sum", **m) == 2
    assert [value(text, "sample_staleness_bucket", le=le, **m) for le in ("0.0", "2.0", "3.0")] == [4, 4, 6]
    assert value(text, "carried", what="tokens", **m) == 60
    assert value(text, "carried_tokens", tier="device", **m) == 80
    assert value(text, "carried_bytes", tier="device", **m) == 100
    assert [r["round_id"] for r in metrics.last_rounds] == ["r", "r"]


def test_legs_that_continue_none_are_counted() -> None:
    april, engine = service()
    for number, mismatch in enumerate((False, True, True)):
        result = messages.FinishedSample("run", "t", 0, 0, b"", b"", [], {"type": "length"}, 0)
        engine.emit(messages.LegEnded("run", "t", "t", number, f"r{number}", None, 0, b"", 0, result, mismatch))
    assert value(april.metrics.exposition(None), "mismatched_legs_total") == 2
    record = april.trajectories.get("run", "t")
    assert record is not None
    assert record.fields(packed=True)["mismatches"] == 2


def test_gauges_of_the_moment_come_from_the_state() -> None:
    text = Metrics("m").exposition(STATE)
    m = {"model_name": "m"}
    assert value(text, "samples", state="suspended", **m) == 3
    assert value(text, "attached_requests", **m) == 3
    assert value(text, "trajectories", state="undelivered", **m) == 5
    assert value(text, "trajectories", state="done", **m) == 2
    assert value(text, "partial_tokens", tier="host", **m) == 20
    assert value(text, "oldest_staleness", **m) == 3
    assert value(text, "policy_version", **m) == 4
    names = ("journal_ok", "journal_bytes", "journal_waiting_batches", "journal_lag_seconds")
    assert [value(text, name, **m) for name in names] == [1, 4096, 2, 0.5]
    faulty = STATE | {"journal": STATE["journal"] | {"fault": "disk full"}, "closed": "push", "staleness": {}}
    text = Metrics("m").exposition(faulty)
    assert [value(text, name, **m) for name in ("journal_ok", "closed", "oldest_staleness")] == [0, 1, 0]
    assert value(Metrics().exposition(STATE | {"journal": None}), "journal_ok") is None


def test_a_scrape_of_a_server_without_enable_metrics() -> None:
    """Rounds and pushes are counted, and the scheduler is queried once, however many scrapes arrive together."""

    async def scenario() -> None:
        april, engine = service()
        engine.answers[messages.GetState] = messages.Answer(0, data=STATE)
        async with client_of(april) as client:
            round_ = await open_round(client, engine, prompts=[prompt(id="a")], quota=1)
            engine.finish(engine.opened, ("a", 0))
            engine.end(engine.opened, ("a", [0]))
            await round_
            assert (await client.post("/april/push/begin")).status_code == 200
            assert (await client.post("/april/push/end")).status_code == 200
            scrapes = await asyncio.gather(*(client.get("/metrics") for _ in range(20)))
        asked = [command for command in engine.commands if isinstance(command, messages.GetState)]
        assert len(asked) == 1
        for scrape in scrapes:
            assert scrape.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert value(scrape.text, "rounds_total", end_reason="quota") == 1
            assert value(scrape.text, "sample_staleness_count") == 1
            assert value(scrape.text, "push_seconds_count") == 1
            assert value(scrape.text, "samples", state="running") == 2
            assert value(scrape.text, "scheduler_answers") == 1

    run(scenario())


def test_a_scrape_does_not_wait_for_a_silent_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability, "PATIENCE_S", 0.01)

    async def scenario() -> None:
        april, engine = service()
        engine.silent.add(messages.GetState)
        async with client_of(april) as client:
            for _ in range(3):
                text = (await client.get("/metrics")).text
                assert value(text, "scheduler_answers") == 0
                assert value(text, "samples", state="running") is None
            asked = [c for c in engine.commands if isinstance(c, messages.GetState)]
            assert len(asked) == 1, "later scrapes wait for the same answer"
            monkeypatch.setattr(observability, "PATIENCE_S", 60.0)
            engine.silent.clear()
            engine.answers[messages.GetState] = answer = messages.Answer(asked[0].seq, data=STATE)
            engine.emit(answer)
            assert value((await client.get("/metrics")).text, "scheduler_answers") == 1

    run(scenario())
