"""Each guard's property holds, and the same check fails when the guard is removed.

`Server.remove_guard` switches a guard off in the running scheduler (tests/support/guards.py). Pushes bring the same
weights again: only the version moves.
"""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.background import BackgroundRound
from tests.support.compare import assert_same, by_key
from tests.support.live import until
from tests.support.server import SLOTS, Server
from tests.support.workload import Forwards, flush, in_one_round, prompt, stoppers, token_ids


def pool(server: Server) -> dict[str, int]:
    return dict(server.state()["pool"])


def in_tree(server: Server) -> int:
    tokens = pool(server)
    return tokens["evictable"] + tokens["protected"]


def tree_insert(server: Server, run: str) -> None:
    """A sample on kept KV inserts nothing into the radix tree; one on fresh KV does."""
    flush(server)
    server.rollout(run=run, prompts=[*stoppers([4]), prompt("old", 30)], quota=1)
    server.push(server.model, flush=False)
    before = in_tree(server)
    (group,) = server.drain(run, kv="keep")
    assert [s["kv"] for s in group["samples"][0]["spans"]] == ["fresh", "kept"]
    assert in_tree(server) == before
    server.rollout(run=run, prompts=[prompt("fresh", 30, ids=token_ids(3, before))], quota=None)
    assert in_tree(server) > before


def version_key(server: Server, run: str) -> None:
    """A prompt hits the cache before a push and not after it, although a partial keeps its prefix alive."""
    ids = token_ids(20, len(run))
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}

    def cached() -> int:
        return int(server.post("/generate", body)["meta_info"]["cached_tokens"])

    server.rollout(run=run, prompts=[*stoppers([4]), prompt("old", 30, ids=ids)], quota=1, tier="device")
    assert cached() > 0
    server.push(server.model, flush=False)
    assert cached() == 0
    assert len(server.drain(run)) == 1


def flush_rescue(server: Server, run: str) -> None:
    """Partials keep their KV across a flush, which moves it out before the pools are cleared."""
    prompts = [*stoppers([6]), prompt("long", 40, n=3)]
    wanted = in_one_round(server, f"{run}-unbroken", prompts)
    flush(server)
    first = server.rollout(run=run, prompts=prompts, quota=1, tier="device")
    assert first["carried"]["tokens_by_tier"]["device"] > 0
    flush(server)
    assert [p["tier"] for p in server.partials(run)] == ["host"] * 3
    last = server.rollout(run=run, prompts=[], quota=None)
    assert last["stats"]["resumed_kept"] == 3
    assert_same(by_key([*first["finished"], *last["finished"]]), wanted)


def accounting(server: Server, run: str) -> None:
    """With partials on the device, an idle scheduler passes SGLang's own leak check."""
    server.rollout(run=run, prompts=[*stoppers([4]), prompt("long", 30)], quota=1, tier="device")
    for _ in range(3):
        tokens = pool(server)
        assert tokens["held"] > 0
        assert tokens.pop("total") == sum(tokens.values())
    assert len(server.drain(run)) == 1


def pages_come_back(server: Server, run: str) -> None:
    """Pages of partials that move to the host are freed exactly once; every step recounts.

    Another run keeps the engine busy: at rest SGLang's own check might come first.
    """
    with server.slowed(0.02):
        BackgroundRound(server, run=f"{run}-busy", prompts=[prompt("busy", 1500)], quota=None)
        until(lambda: server.state()["samples"]["running"] == 1)
        server.rollout(run=run, prompts=[*stoppers([4]), prompt("long", 30)], quota=1, tier="host")
        until(lambda: pool(server)["held"] == 0)
        assert len(server.drain(run)) == 1
        server.post("/april/drop", {"run": f"{run}-busy"})


def in_step_stop(server: Server, run: str) -> None:
    """No forward of the model after the step that meets the quota."""
    count = Forwards(server)
    reply = server.rollout(run=run, prompts=[*stoppers([6]), prompt("long", 60)], quota=1)
    assert server.state()["samples"]["running"] == 0
    assert len(count.rows(decode=True)) == 5
    assert reply["carried"]["tokens"] == 6
    assert len(server.drain(run)) == 1


def deliver_once(server: Server, run: str) -> None:
    """No sample is delivered in two replies."""
    groups = server.rollout(run=run, prompts=[*stoppers([4]), prompt("long", 12)], quota=1)["finished"]
    groups += server.drain(run)
    assert sorted(by_key(groups)) == [("long", 0, 0), ("stop-4", 0, 0)]


def no_sleep_on_work(server: Server, run: str) -> None:
    """When all slots finish in the same step, waiting samples start although the engine is idle.

    A server that sleeps when idle would wait for a message: those samples are in no queue of SGLang's.
    """
    before = len(server.forwards())
    server.rollout(run=run, prompts=[prompt(f"p{i}", 5, ids=1, n=SLOTS) for i in range(3)], quota=None)
    forwards = [f["at"] for f in server.forwards()[before:]]
    assert len(forwards) == 3 * 5
    assert [at for at in server.sleeps() if forwards[0] < at < forwards[-1]] == []


Property = Callable[[Server, str], None]
LIVING: dict[str, Property] = {
    "tree insert": tree_insert,
    "version key": version_key,
    "in-step stop": in_step_stop,
    "deliver once": deliver_once,
    "no sleep on work": no_sleep_on_work,
}
DEADLY: dict[str, tuple[Property, str]] = {
    "flush rescue": (flush_rescue, "AccountingError"),
    "accounting": (accounting, "pool memory leak detected"),
    "every page freed": (pages_come_back, "AccountingError: KV pool: 1 pages without an owner, 0 with more than one"),
    "no shared page freed": (
        pages_come_back,
        "AccountingError: KV pool: 0 pages without an owner, 1 with more than one",
    ),
}
"""Guards without which the server ends, and the message in its log."""


ON = {"accounting": "overlap", "no shared page freed": "overlap"}
"""Servers of guards that are not tested on the normal loop."""


@pytest.fixture
def guarded(request: pytest.FixtureRequest, name: str) -> Iterator[Server]:
    """The server on which the guard `name` can be removed; teardown restores it."""
    server: Server = request.getfixturevalue(ON.get(name, "server"))
    yield server
    server.remove_guard(None)


@pytest.mark.parametrize("name", [*LIVING, *DEADLY])
def test_property_holds(guarded: Server, run: str, name: str) -> None:
    """The property that the guard protects."""
    check: Any = LIVING.get(name) or DEADLY[name][0]
    check(guarded, run)


@pytest.mark.parametrize("name", LIVING)
def test_property_fails_without_its_guard(
    guarded: Server, run: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    """The same check, with the guard removed while the server runs."""
    guarded.remove_guard(name)
    with pytest.raises(AssertionError):
        LIVING[name](guarded, run)
    record_property("guard", name)


@pytest.mark.ends_server
@pytest.mark.parametrize("name", DEADLY)
def test_server_ends_without_its_guard(
    guarded: Server, run: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    """With the guard removed, the pool accounts no longer match and the server ends."""
    guarded.remove_guard(name)
    with pytest.raises((AssertionError, httpx.HTTPError)):
        DEADLY[name][0](guarded, run)
    guarded.stop()
    assert DEADLY[name][1] in guarded.log.read_text(errors="replace")
    record_property("guard", name)
