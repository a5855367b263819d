"""SIGTERM in the scheduler and in the service: what a restart can use is stored, and open rounds get 503."""

import asyncio
import json
from pathlib import Path

import pytest

from sglang_april.api import messages
from sglang_april.api.errors import SHUTDOWN
from sglang_april.http.shutdown import shut_down
from sglang_april.scheduler import report
from tests.unit.controller_harness import ControllerHarness, given_as, ids, lengths
from tests.unit.crashing_harness import CrashingHarness
from tests.unit.http_app import client_of, open_round
from tests.unit.leg_harness import LegHarness
from tests.unit.recount import samples_of
from tests.unit.scripted_engine import ScriptedEngine, prompt, service


def tiers(w: ControllerHarness) -> dict[str, str]:
    """The tier of each unfinished sample's KV, by prompt id."""
    samples = [s for s in samples_of(w.ledger) if s.length]
    return {s.group.id: s.kv.pages.tier if s.kv.pages is not None else "none" for s in samples if s.finish_step < 0}


@pytest.mark.parametrize("overlap", [False, True])
def test_partials_of_all_tiers_move_to_the_disk_and_come_back(tmp_path: Path, overlap: bool) -> None:
    w = CrashingHarness(tmp_path / "j", replicas=2, overlap=overlap, disk_cap=400, copy_delay=2)
    w.open("host", lengths(4, 40, 50), tier="host")
    w.reply("host")
    w.open("device", lengths(4, 45), tier="device")
    w.reply("device")
    w.open("running", {"r": (3, 2, -60)})
    w.step(10)
    w.command(messages.Shutdown, store=True)
    lengths_before = {s.group.id: s.length for s in samples_of(w.ledger) if s.finish_step < 0}
    w.step(20)
    assert set(tiers(w).values()) == {"disk"}, "nothing runs, and all copies have ended"
    assert report.store(w.controller.context, w.controller.tiers)["in_flight"] == 0
    late = w.open("late", lengths(1))
    assert (late.status, late.field) == (503, SHUTDOWN)
    w.crash()
    assert {s.group.id: s.length for s in samples_of(w.ledger) if s.finish_step < 0} == lengths_before
    assert set(tiers(w).values()) == {"disk"}
    w.drain()


def test_without_a_journal_nothing_is_moved() -> None:
    w = ControllerHarness(disk_cap=400)
    w.open("run", lengths(4, 40, 50))
    w.reply()
    w.command(messages.Shutdown, store=False)
    w.step(5)
    assert set(tiers(w).values()) == {"device"}
    assert w.open("late", lengths(1)).status == 503


def test_the_most_valuable_are_written_first() -> None:
    """Time may not suffice for all. A recompute of long samples costs most per byte."""
    w = ControllerHarness(disk_cap=400, slots=8)
    for run, sizes in (("host", (5, 40, 60)), ("device", (9, 50, 60))):
        w.open(run, {f"{run}{i}": (3 + i, 1, -size) for i, size in enumerate(sizes)}, tier=run)
        w.reply(run)
    written: list[int] = []
    for name in ("copy_out", "spill"):
        stock = getattr(w.engine, name)
        setattr(w.engine, name, lambda s, order, stock=stock: (written.append(s.kv.pages.length), stock(s, order)))
    w.command(messages.Shutdown, store=True)
    assert len(set(written)) == 4
    assert written == sorted(written, reverse=True)


@pytest.mark.parametrize("longest", ["host", "device"])
def test_a_small_disk_keeps_the_longest(longest: str) -> None:
    """Samples on the host and on the device compete for its room."""
    w = ControllerHarness(disk_cap=40, slots=8)
    for run in ("host", "device"):
        w.open(run, {"short": (3, 1, -30 if run == longest else -10), f"{run}-long": (3, 1, -60)}, tier=run)
        w.reply(run)
    assert tiers(w) == {"host-long": "host", "device-long": "device"}
    w.command(messages.Shutdown, store=True)
    w.step(5)
    other = "device" if longest == "host" else "host"
    after = tiers(w)
    assert after[f"{longest}-long"] == "disk"
    assert after[f"{other}-long"] != "disk"


@pytest.mark.parametrize("names", [(), ("t",)], ids=["request", "leg"])
def test_attached_requests_take_no_room_on_the_disk(names: tuple[str, ...]) -> None:
    """A restart cannot use their KV, however long they are."""
    w = LegHarness(disk_cap=40)
    given, params = given_as({"p": (5, 1, -60)})
    w.command(
        messages.OpenRound,
        spec=messages.RoundSpec("r", "run", None, "group", "keep", None),
        prompts=given,
        params=params,
    )
    w.leg("agents", "a", [1] * 20, 60, *names)
    w.step(10)
    w.command(messages.Shutdown, store=True)
    w.step(5)
    tier_of = {s.attached: s.kv.pages.tier for s in w.context.ledger.with_kv() if s.kv.pages is not None}
    assert tier_of == {False: "disk", True: "device"}


def test_a_round_that_is_over_ends_before_the_shutdown() -> None:
    """In the overlap loop the step in flight may meet the quota."""
    w = ControllerHarness(overlap=True)
    w.open("run", lengths(6, 60))
    while not w.replies:
        w.step()
        if w.engine.in_flight and w.drawn("run", "p0") == 5:
            break
    received: list[messages.Event] = []
    receive, w.engine.on_event = w.engine.on_event, received.append
    w.controller.command(messages.Shutdown(99, store=False))
    assert [type(event) for event in received] == [messages.Finished, messages.RoundEnded, messages.Answer]
    for event in received[:2]:
        receive(event)
    assert [ids(r) for r in w.replies] == [["p0"]]


def test_open_rounds_get_503_and_copies_are_waited_for() -> None:
    engine = ScriptedEngine()
    requested: list[type] = []
    stock = engine._answer

    def answer(command: messages.Command) -> messages.Answer:
        requested.append(type(command))
        if isinstance(command, messages.GetState):
            return messages.Answer(command.seq, data={"store": {"in_flight": requested.count(messages.GetState) < 3}})
        return stock(command)

    engine._answer = answer  # type: ignore[method-assign]

    async def story() -> None:
        april, _ = service(engine, journal="/j", disk_dir="/tmp", disk_gb=1.0)
        april.restored_state._complete.set()
        async with client_of(april) as client:
            waiting = await open_round(client, engine, prompts=[prompt()])
            while not april.rounds.open_ids():
                await asyncio.sleep(0)
            await shut_down(april)
            ended, refused = await waiting, await client.post("/april/rollout", json={"prompts": [prompt()]})
        assert (ended.status_code, ended.json()["error"]["field"]) == (503, SHUTDOWN)
        assert "open again" in ended.json()["error"]["reason"]
        shutting_down = {"field": SHUTDOWN, "reason": "the server is shutting down"}
        assert (refused.status_code, refused.json()["error"]) == (503, shutting_down)
        assert requested.count(messages.GetState) == 3
        assert requested.count(messages.Shutdown) == 1

    asyncio.run(story())


def test_the_last_event_of_an_open_stream_has_the_status() -> None:
    async def story() -> None:
        april, engine = service()
        async with client_of(april) as client:
            streaming = await open_round(client, engine, prompts=[prompt()], stream=True)
            while not april.rounds.open_ids():
                await asyncio.sleep(0)
            await shut_down(april)
            event = json.loads((await streaming).text)
        assert event == {
            "event": "error",
            "status": 503,
            "error": {"field": SHUTDOWN, "reason": "the server is shutting down"},
        }

    asyncio.run(story())
