"""Admission order, concurrency and the staleness bound. Pushes load the same weights."""

from typing import Any

from tests.support.background import BackgroundRound, stream
from tests.support.compare import by_key
from tests.support.live import until
from tests.support.server import Server
from tests.support.workload import Forwards, prompt, stoppers


def push(server: Server) -> int:
    return server.push(server.model, flush=False)


def ids(reply: dict[str, Any]) -> list[str]:
    return [g["id"] for g in reply["finished"]]


def test_unstarted_prompts_stay_untouched(server: Server, run: str) -> None:
    """Prompts without a slot draw no tokens, do not age, and are on-policy after a push."""
    reply = server.rollout(run=run, prompts=[prompt(f"p{i:02}", 6) for i in range(30)], quota=4, concurrency=4)
    assert ids(reply) == ["p00", "p01", "p02", "p03"]
    assert reply["stats"]["started"] == 4
    assert (reply["carried"]["samples"], reply["carried"]["tokens"]) == (26, 0)
    assert server.partials(run) == []
    assert server.state()["samples"]["queued"] == 26
    for _ in range(2):
        version = push(server)
    second = server.rollout(run=run, prompts=[], quota=26, max_staleness=1)
    assert ids(second) == [f"p{i:02}" for i in range(4, 30)]
    assert second["carried"]["oldest_staleness"] == 0
    assert second["stats"]["over_bound"] == 0
    assert second["stats"]["delivered"]["off_policy_share"] == 0
    assert second["stats"]["delivered"]["tokens_by_version"] == {str(version): 26 * 6}


def test_partials_run_before_started_groups_and_new_groups(server: Server, run: str) -> None:
    """With one slot, samples run in admission order, which the stream shows."""
    first = [prompt("stop", 3), prompt("begun", 8, n=4), prompt("old", 5)]
    server.rollout(run=run, prompts=first, quota=1, concurrency=4)
    assert [(p["id"], p["index"]) for p in server.partials(run)] == [("begun", 0), ("begun", 1), ("begun", 2)]
    *events, _ = stream(server, run=run, prompts=[prompt("new", 4)], quota=None, quota_unit="sample", concurrency=1)
    order = [(e["id"], s["index"]) for e in events for s in e["samples"]]
    assert order == [*(("begun", i) for i in range(4)), ("old", 0), ("new", 0)]


def test_concurrency_limits_a_run(server: Server, run: str) -> None:
    """At most `concurrency` samples of the run are running, and the slots stay full."""
    count = Forwards(server)
    reply = server.rollout(run=run, prompts=[prompt(f"p{i}", 4 + i, n=3) for i in range(6)], quota=None, concurrency=5)
    rows = count.rows(decode=True)
    assert max(rows) == 5
    # A prefill draws the first token of each group; the other members draw it in a decode step.
    assert sum(rows) == reply["stats"]["tokens_generated"] - 6
    assert max(n for _, n in reply["stats"]["timeline"]) == 5


def test_concurrency_auto_is_measured_and_broadcast(server: Server, run: str) -> None:
    """Rank 0 broadcasts the measured limit for `auto`, and the round uses it."""
    prompts = [prompt(f"p{i}", 200) for i in range(60)]
    reply = server.rollout(run=run, prompts=prompts, quota=None, concurrency="auto")
    assert {len(s["output_ids"]) for s in by_key(reply["finished"]).values()} == {200}
    assert len(reply["finished"]) == 60
    tuned, stats = server.state()["tuned"], reply["stats"]
    assert 1 <= min(tuned["concurrency"], stats["concurrency"]) <= max(tuned["concurrency"], stats["concurrency"]) <= 48
    assert stats["step_ms"]
    assert all(1 <= batch <= 48 and ms > 0 for batch, ms in stats["step_ms"])
    assert server.rollout(run=run, prompts=[prompt("one", 3)], quota=1)["stats"]["concurrency"] is None


def test_runs_share_slots_round_robin(server: Server, run: str) -> None:
    """Two runs with more work than slots get half of the slots each and deliver only their own samples."""
    server.post("/pause_generation", {"mode": "in_place"})
    names = [f"{run}-a", f"{run}-b"]
    rounds = [
        BackgroundRound(server, run=name, prompts=[prompt(f"p{i}", 5 + i % 7) for i in range(60)], quota=40)
        for name in names
    ]
    until(lambda: len(server.state()["rounds"]) == 2)
    server.post("/continue_generation", {"torch_empty_cache": False})
    replies = [r.reply() for r in rounds]
    for name, reply in zip(names, replies, strict=True):
        assert reply["run"] == name
        assert len(reply["finished"]) == 40
        assert reply["stats"]["timeline"][0][1] == 24
    for name, reply in zip(names, replies, strict=True):
        assert len(by_key([*reply["finished"], *server.drain(name)])) == 60


def test_stock_requests_progress_during_a_round(server: Server, run: str) -> None:
    """`/generate` gets slots while a round with far more samples than slots is open."""
    with server.slowed():
        round_ = BackgroundRound(server, run=run, prompts=[prompt(f"p{i}", 30) for i in range(160)], quota=None)
        until(lambda: server.state()["samples"]["running"] >= 48)
        reply = server.post(
            "/generate", {"input_ids": [9, 8, 7], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        )
        assert len(reply["output_ids"]) == 5
        assert server.state()["samples"]["queued"] > 0, "every sample got a slot"
    assert len(round_.reply()["finished"]) == 160


def test_group_at_the_staleness_bound_is_mandatory(server: Server, run: str) -> None:
    """A group with staleness >= max_staleness is delivered first, with all members."""
    first = [*stoppers([4]), prompt("old", 30, n=6)]
    assert ids(server.rollout(run=run, prompts=first, quota=1, concurrency=5)) == ["stop-4"]
    assert len(server.partials(run)) == 4
    push(server)
    new = [prompt(f"new-{i}", 5) for i in range(3)]
    second = server.rollout(run=run, prompts=new, quota=1, max_staleness=2)
    assert ids(second) == ["new-0"]
    assert second["carried"]["oldest_staleness"] == 1
    third = server.rollout(run=run, prompts=[], quota=1, max_staleness=1)
    assert ids(third) == ["old"]
    assert len(third["finished"][0]["samples"]) == 6
    assert third["end_reason"] == "quota"
    assert third["stats"]["over_bound"] == 0
    assert third["carried"]["finished_groups"] == 2
    assert ids(server.rollout(run=run, prompts=[], quota=2)) == ["new-1", "new-2"]


def test_group_over_the_staleness_bound_is_delivered_and_counted(server: Server, run: str) -> None:
    """After several pushes between two rounds, also for partials left by `stop`; nothing is dropped."""
    server.rollout(run=run, prompts=[*stoppers([4]), prompt("old", 9), prompt("older", 12)], quota=1)
    for _ in range(3):
        push(server)
    body = {"prompts": [prompt("long", 1500)], "quota": 3, "max_staleness": 1}
    with server.slowed():
        round_ = BackgroundRound(server, run=run, round_id=f"{run}-s", **body)
        until(lambda: server.state()["samples"]["finished"] == 2)
        assert not round_.done
        server.post(f"/april/rounds/{run}-s/stop")
        reply = round_.reply()
    assert ids(reply) == ["old", "older"]
    assert reply["stats"]["over_bound"] == 2
    server.post("/april/drop", {"run": run})


def test_push_during_a_round_makes_groups_mandatory(server: Server, run: str) -> None:
    """Each push during the round checks the bound again."""
    prompts = [prompt(f"p{i}", 400 + 40 * i) for i in range(3)]
    with server.slowed():
        round_ = BackgroundRound(server, run=run, prompts=prompts, quota=1, max_staleness=1)
        until(lambda: server.state()["samples"]["running"] == 3)
        push(server)
    reply = round_.reply()
    assert ids(reply) == ["p0", "p1", "p2"]
    assert reply["stats"]["pushes"] == 1
    assert reply["end_reason"] in ("quota", "exhausted")


def test_max_staleness_zero_carries_no_partials(server: Server, run: str) -> None:
    """Strictly on-policy: only as many groups start as the quota needs, in either unit, and all finish."""
    ends = {"temperature": 1.0, "stop_token_ids": list(range(6, 40))}
    prompts = [prompt(f"p{i:02}", 40, n=3, **ends) for i in range(20)]
    reply = server.rollout(run=run, prompts=prompts, quota=4, max_staleness=0)
    assert sorted(ids(reply)) == ["p00", "p01", "p02", "p03"]
    assert reply["stats"]["started"] == 12
    assert reply["carried"]["tokens"] == 0
    assert server.partials(run) == []
    reply = server.rollout(run=run, prompts=[], quota=4, quota_unit="sample", max_staleness=0)
    assert sorted(ids(reply)) == ["p04", "p05"]
    assert reply["stats"]["started"] == 6
    push(server)
    reply = server.rollout(run=run, prompts=[], quota=2, max_staleness=0)
    assert reply["stats"]["delivered"]["off_policy_share"] == 0
    server.post("/april/drop", {"run": run})


def test_max_staleness_zero_finishes_partials_of_older_rounds(server: Server, run: str) -> None:
    """Under `max_staleness: 0`, partials are mandatory and count towards the quota."""
    server.rollout(run=run, prompts=[*stoppers([4]), prompt("a", 20), prompt("b", 9)], quota=1)
    reply = server.rollout(run=run, prompts=[prompt(f"new-{i}", 3) for i in range(4)], quota=1, max_staleness=0)
    assert ids(reply) == ["b", "a"]
    assert reply["stats"]["started"] == 0
    assert ids(server.rollout(run=run, prompts=[], quota=4)) == [f"new-{i}" for i in range(4)]
