"""A push is one policy in any number of weight calls; the version moves once, or not at all."""

from typing import Any

import pytest

from sglang_april.adapter import versions
from tests.support.buckets import buckets_of, misshapen, send
from tests.support.live import LiveServer, until
from tests.support.workload import prompt, stoppers

TEN = 10
PARAMS: dict[str, Any] = {"temperature": 0.8}


def long_ones(count: int = 2) -> list[dict[str, Any]]:
    return [prompt(f"long-{i}", 30 + i, n=2, **PARAMS) for i in range(count)]


def carry(live: LiveServer, run: str) -> None:
    """A run with four partials of this version."""
    reply = live.server.rollout(run=run, prompts=[*stoppers([6]), *long_ones()], quota=1)
    assert [g["id"] for g in reply["finished"]] == ["stop-6"]
    assert len(live.server.partials(run)) == 4


def finish(live: LiveServer, run: str, *spans: tuple[int, str]) -> None:
    """Finish the partials and check their spans and tokens."""
    groups = live.server.drain(run)
    assert sorted(g["id"] for g in groups) == ["long-0", "long-1"]
    for sample in (s for g in groups for s in g["samples"]):
        assert [(s["version"], s["kv"]) for s in sample["spans"]] == list(spans)
    live.check(groups, dict.fromkeys(["long-0", "long-1"], PARAMS))


def push_buckets(live: LiveServer, seed: int, **named: int) -> int:
    """Push in ten buckets between `begin` and `end`."""
    server = live.server
    server.post("/april/push/begin", named)
    before = live.version
    for bucket in buckets_of(live.model(seed), TEN):
        assert send(server, bucket)["success"]
        assert (live.version, server.state()["push_open"]) == (before, True)
    version = int(server.post("/april/push/end")["policy_version"])
    live.policies[version] = live.model(seed)
    return version


def test_ten_buckets_move_the_version_once(live: LiveServer, run: str) -> None:
    """The version moves once, at the end; partials resume under exactly the pushed policy."""
    v = live.version
    carry(live, run)
    assert push_buckets(live, 1) == v + 1
    finish(live, run, (v, "fresh"), (v + 1, "kept"))


def test_buckets_without_begin_and_end_belong_to_one_push_until_a_forward(live: LiveServer, run: str) -> None:
    """The version moves at the first accepted call after any forward, also one of a stock request."""
    v = live.version
    carry(live, run)
    half = TEN // 2
    buckets = buckets_of(live.model(1), TEN)
    for bucket in buckets[:half]:
        assert send(live.server, bucket)["success"]
        assert live.version == v + 1
    live.server.post("/generate", {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 1}})
    for bucket in buckets[half:]:
        assert send(live.server, bucket)["success"]
        assert live.version == v + 2
    live.policies[v + 2] = live.model(1)
    finish(live, run, (v, "fresh"), (v + 2, "kept"))


def test_session_of_sglang_is_one_push(live: LiveServer, run: str) -> None:
    """Releases without hooks on such a session have no route for it."""
    server, v = live.server, live.version
    if not any(row.handler == "hooks_control:begin_push" for row in versions.hook_table().HOOKS):
        assert server.http.post("/begin_weight_update", json={}).status_code == 404
        return
    carry(live, run)
    assert server.post("/begin_weight_update", {})["success"]
    for bucket in buckets_of(live.model(1), TEN):
        assert send(server, bucket)["success"]
        assert (live.version, server.state()["push_open"]) == (v, True)
    assert server.post("/end_weight_update", {})["success"]
    assert (live.version, server.state()["push_open"]) == (v + 1, False)
    live.policies[v + 1] = live.model(1)
    finish(live, run, (v, "fresh"), (v + 1, "kept"))


@pytest.mark.parametrize("mode", [None, "in_place"])
def test_weight_version_names_the_policy_version(live: LiveServer, run: str, mode: str | None) -> None:
    """As slime pushes: every call has the number of the push, and the same number again is the same push."""
    v, server = live.version, live.server
    carry(live, run)
    if mode:
        server.post("/pause_generation", {"mode": mode})
    for bucket in buckets_of(live.model(1), TEN):
        assert send(server, bucket, weight_version=str(v + 5))["success"]
        assert live.version == v + 5
        if not mode:
            server.post("/generate", {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 1}})
    if mode:
        server.post("/continue_generation", {})
    assert server.http.get("/model_info").json()["weight_version"] == str(v + 5)
    old = send(server, buckets_of(live.model(0), TEN)[0], status=400, weight_version=str(v + 4))
    assert f"the policy version is {v + 5}" in old["message"]
    assert (live.version, server.state()["closed"]) == (v + 5, "")
    live.policies[v + 5] = live.model(1)
    finish(live, run, (v, "fresh"), (v + 5, "kept"))


def closed_by(live: LiveServer, run: str, reason: str) -> None:
    """Assert that admission is closed: the state and new rounds give the reason, and nothing steps."""
    assert reason in live.server.state()["closed"]
    refused = live.server.rollout(run=run, prompts=[], status=503)
    assert reason in refused["error"]["reason"]
    assert live.server.state()["rounds"] == []


@pytest.mark.parametrize("fault", ["a wrong shape", "no tensors at all"])
def test_failed_bucket_closes_admission_until_the_next_push(live: LiveServer, run: str, fault: str) -> None:
    """Until a push succeeds, `end` is refused, the version stays, and rounds get 503 with the reason."""
    server, v = live.server, live.version
    carry(live, run)
    server.post("/april/push/begin")
    first, second, *rest = buckets_of(live.model(1), TEN)
    assert send(server, first)["success"]
    failed = send(server, misshapen(second) if "shape" in fault else b"nothing", status=400)
    assert not failed["success"]
    closed_by(live, run, "the weights are updated only in part")
    for bucket in rest:
        send(server, bucket)
    assert "failed" in server.post("/april/push/end", status=409)["error"]["reason"]
    assert live.version == v
    closed_by(live, run, "the weights are updated only in part")
    assert push_buckets(live, 1) == v + 1
    assert server.state()["closed"] == ""
    finish(live, run, (v, "fresh"), (v + 1, "kept"))


def test_failed_bucket_without_begin_needs_a_full_update(live: LiveServer, run: str) -> None:
    """Without begin and end, a later good bucket does not reopen admission; a full update from disk does."""
    v = live.version
    carry(live, run)
    first, second, *_ = buckets_of(live.model(1), TEN)
    send(live.server, misshapen(first), status=400)
    closed_by(live, run, "the weights are updated only in part")
    assert send(live.server, second)["success"]
    closed_by(live, run, "the weights are updated only in part")
    assert live.version == v
    assert live.load(1)["success"]
    assert live.version == v + 1
    live.policies[v + 1] = live.model(1)
    finish(live, run, (v, "fresh"), (v + 1, "kept"))


def test_unreadable_policy_closes_admission(live: LiveServer, run: str) -> None:
    """The same for an update from disk whose folder does not exist."""
    v = live.version
    server = live.server
    server.post("/april/push/begin")
    server.post("/update_weights_from_disk", {"model_path": "/nowhere", "flush_cache": False}, status=400)
    closed_by(live, run, "the weights are updated only in part")
    server.post("/april/push/end", status=409)
    assert live.push(0) == v + 1
    assert server.rollout(run=run, prompts=[prompt("a", 2)], quota=1)["policy_version"] == v + 1


def test_unfinished_push_closes_admission(live: LiveServer, run: str) -> None:
    """Between begin and end no sample takes a step, and rounds are refused with the reason."""
    carry(live, run)
    before = len(live.server.forwards())
    live.server.post("/april/push/begin")
    closed_by(live, run, "a push is open")
    assert len(live.server.forwards()) == before
    v = int(live.server.post("/april/push/end")["policy_version"])
    live.policies[v] = live.model(0)
    finish(live, run, (v - 1, "fresh"), (v, "kept"))


def test_a_named_version_must_be_greater(normal: LiveServer) -> None:
    """The version moves to the one that begin or end names; equal or below is a 409 that changes nothing."""
    server, v = normal.server, normal.version

    def refused(path: str, version: int, *, push_open: bool) -> None:
        assert server.post(path, {"version": version}, status=409)["error"]["field"] == "version"
        assert (normal.version, server.state()["push_open"]) == (v, push_open)

    for version in (v, v - 1) if v else (v,):
        refused("/april/push/begin", version, push_open=False)
    server.post("/april/push/begin", {"version": v + 7})
    refused("/april/push/end", v, push_open=True)
    assert server.post("/april/push/end")["policy_version"] == v + 7
    v += 7
    server.post("/april/push/begin")
    refused("/april/push/end", v, push_open=True)
    assert server.post("/april/push/end", {"version": v + 2})["policy_version"] == v + 2
    assert normal.version == v + 2


def test_second_begin_restarts_the_push_and_end_needs_a_begin(normal: LiveServer) -> None:
    """A second begin replaces the first; `end` without `begin` is a 409."""
    server, v = normal.server, normal.version
    assert server.post("/april/push/end", status=409)["error"]["field"] == "push"
    server.post("/april/push/begin", {"version": v + 9})
    server.post("/april/push/begin")
    assert server.post("/april/push/end")["policy_version"] == v + 1
    assert server.post("/april/push/end", status=409)["error"]["field"] == "push"
    assert normal.version == v + 1


def test_ten_buckets_inside_an_open_round(live: LiveServer, run: str) -> None:
    """A push of ten buckets suspends the round once; it resumes under the new version."""
    v = live.version
    with live.server.slowed():
        reply = live.open(run=run, prompts=long_ones(), quota=None)
        assert push_buckets(live, 1) == v + 1
        until(lambda: live.running() == 4 or reply.done(), "the round continues")
    groups = live.result_of(reply)["finished"]
    for sample in (s for g in groups for s in g["samples"]):
        assert [(s["version"], s["kv"]) for s in sample["spans"]] == [(v, "fresh"), (v + 1, "kept")]
    live.check(groups, dict.fromkeys(["long-0", "long-1"], PARAMS))
