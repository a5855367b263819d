"""The online audit: which samples it chooses, when it runs, what it discards, and what a finding does."""

import asyncio
from typing import Any

import numpy as np
import pytest

from sglang_april.api import messages
from sglang_april.config import AprilConfig
from sglang_april.http import audit as audit_module
from sglang_april.http.audit import Audit
from sglang_april.http.scheduler_rpc import SchedulerRpc
from tests.unit.finished_samples import finished
from tests.unit.http_app import client_of, run, until
from tests.unit.http_app import open_round as open_in
from tests.unit.scripted_engine import ScriptedEngine, prompt, service


class Scene:
    """An audit on a scripted engine, without rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr(audit_module, "POLL_S", 0.001)
        self.engine = ScriptedEngine()
        self.engine.april = self  # type: ignore[assignment]
        self.rpc = SchedulerRpc(self.engine.send)
        self.outcomes: list[str] = []
        config = AprilConfig(**{"audit": 2, **settings})
        self.audit = Audit(self.engine, self.rpc, config, lambda outcome, _: self.outcomes.append(outcome))

    def receive(self, payload: bytes) -> None:
        answer = messages.decode_event(payload)
        assert isinstance(answer, messages.Answer)
        self.rpc.answered(answer)

    def offer(self, count: int = 1, version: int = 0, **named: Any) -> None:
        for _ in range(count):
            self.audit.offer(*finished([(0, 4, version, "fresh")], **named))


def test_as_many_samples_of_each_version_are_rescored_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch)
        scene.offer(50)
        await until(lambda: len(scene.outcomes) == 2)
        scene.offer(50)
        scene.engine.version = 1
        scene.offer(1, version=0)
        scene.offer(1, version=1)
        scene.offer(1, version=0)
        await until(lambda: len(scene.outcomes) == 3)
        await asyncio.sleep(0.01)
        assert scene.outcomes == ["ok"] * 3
        assert scene.audit.state()["waiting"] == 0

    run(scenario())


def test_every_sample_is_chosen_with_the_same_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        chosen = [0] * 10
        scene = Scene(monkeypatch)
        scene.engine.silent.add(messages.GetState)
        for version in range(500):
            for length in range(1, 11):
                scene.audit.offer(*finished([(0, length, version, "fresh")]))
            for picked in scene.audit._chosen:
                chosen[len(picked.positions) - 1] += 1
        assert min(chosen) > 60
        assert max(chosen) < 140

    run(scenario())


def test_off_by_default_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch, audit=AprilConfig().audit)
        scene.offer(5)
        await asyncio.sleep(0.01)
        assert scene.engine.commands == []
        assert scene.engine.rescored == []
        assert (scene.audit._eligible, scene.audit._worker) == (0, None)

    run(scenario())


def test_while_samples_run_audits_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an audit that took a while, the next one waits 49 times as long, or until nothing runs."""

    async def scenario() -> None:
        scene = Scene(monkeypatch)
        scene.engine.running, scene.engine.hold_rescores = 1, True
        scene.offer(2)
        await until(lambda: len(scene.engine.rescored) == 1)
        await asyncio.sleep(0.1)
        scene.engine.hold_rescores = False
        for answer in scene.engine.rescoring.values():
            answer.set_result(np.linspace(-1, -0.1, 4, dtype="<f4").tolist())
        await until(lambda: scene.outcomes == ["ok"])
        await asyncio.sleep(0.05)
        assert len(scene.engine.rescored) == 1
        scene.engine.running = 0
        await until(lambda: scene.outcomes == ["ok"] * 2)

    run(scenario())


def test_nothing_runs_while_it_is_held_and_what_runs_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch)
        scene.engine.hold_rescores = True
        scene.offer(2)
        await until(lambda: len(scene.engine.rescored) == 1)
        async with scene.audit.paused():
            await until(lambda: scene.outcomes == ["discarded"])
            await asyncio.sleep(0.01)
            assert len(scene.engine.rescored) == 1
        await until(lambda: len(scene.engine.rescored) == 2)

    run(scenario())


def test_a_sample_waits_until_its_result_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch)
        scene.engine.hold_rescores = True
        scene.offer()
        await until(lambda: len(scene.engine.rescored) == 1)
        call = scene.rpc.call

        async def call_later(command: Any) -> Any:
            await asyncio.sleep(0.01)
            return await call(command)

        monkeypatch.setattr(scene.rpc, "call", call_later)
        for answer in scene.engine.rescoring.values():
            answer.set_result([0.0] * 4)
        while not scene.outcomes:
            assert scene.audit.state()["waiting"] == 1
            await asyncio.sleep(0)

    run(scenario())


def test_a_result_is_discarded_if_the_version_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(monkeypatch)
        scene.engine.hold_rescores = True
        scene.offer(2)
        await until(lambda: len(scene.engine.rescored) == 1)
        scene.engine.version = 1
        for answer in scene.engine.rescoring.values():
            answer.set_result([0.0] * 4)
        await until(lambda: scene.outcomes == ["discarded"] * 2)
        assert len(scene.engine.rescored) == 1
        assert scene.audit.state()["findings"] == []

    run(scenario())


def test_tolerance_follows_the_type_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.audit.tolerance == 1e-3
    scene.engine._info = ScriptedEngine(dtype="bfloat16").server_info()
    assert scene.audit.tolerance == 0.1
    assert Scene(monkeypatch, audit_tolerance=0.5).audit.tolerance == 0.5


@pytest.mark.parametrize("strict", [False, True])
def test_a_finding_is_reported_and_with_strict_refuses_rounds(strict: bool) -> None:
    """After a push rounds stay refused; a known round_id is still answered; an acknowledgement admits rounds again."""

    async def scenario() -> None:
        april, engine = service(audit=1, audit_strict=strict)
        engine.hold_rescores = True
        async with client_of(april) as client:
            reply = await open_in(client, engine, round_id="one", prompts=[prompt(id="a")])
            engine.finish(engine.opened, ("a", 0))
            engine.end(engine.opened, ("a", [0]))
            assert (await reply).status_code == 200
            await until(lambda: engine.rescored)
            (rid, ids, start, temperature), *_ = engine.rescored
            assert (ids, start, temperature) == ([1, 2, 3, ord("a"), ord("b")], 2, 1.0)
            engine.rescoring[rid].set_result([-1.0, -3.0])
            await until(lambda: april.audit.state()["found"])
            state = (await client.get("/april/state")).json()["audit"]
            assert state["findings"][0]["id"] == "a"
            assert bool(state["refusal"]) == strict
            await client.post("/april/push/begin")
            await client.post("/april/push/end")
            if strict:
                refused = await client.post("/april/rollout", json={"round_id": "two", "prompts": [prompt()]})
                assert refused.status_code == 503
                assert refused.json()["error"]["field"] == "audit"
                again = await client.get("/april/rounds/one")
                assert again.status_code == 200
            assert (await client.post("/april/audit/ack")).json()["refusal"] == ""
            await open_in(client, engine, round_id="two", prompts=[prompt()])
            assert engine.opened.spec.round_id == "two"
            await client.post("/april/rounds/two/stop")
            engine.end(engine.opened)

    run(scenario())


def test_a_refused_round_names_the_reason() -> None:
    async def scenario() -> None:
        april, _ = service(audit=1, audit_strict=True)
        april.audit.refusal = "the audit found it wrong"
        async with client_of(april) as client:
            refused = await client.post("/april/rollout", json={"prompts": [prompt()]})
        assert refused.status_code == 503
        assert refused.json()["error"] == {"field": "audit", "reason": "the audit found it wrong"}

    run(scenario())
