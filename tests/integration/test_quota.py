"""How rounds end and what they deliver: group and sample quotas, exhaustion, the stop route (`quota-exact`)."""

from typing import Any

import pytest

from tests.support.background import BackgroundRound, stream
from tests.support.compare import Key, assert_near, by_key, stock_noise
from tests.support.live import until
from tests.support.server import Server
from tests.support.workload import Forwards, in_one_round, prompt

ENDS_AT_RANDOM = {"temperature": 1.0, "stop_token_ids": list(range(6, 70))}
"""One token in eight ends a sample."""


def groups_of_four(count: int) -> list[dict[str, Any]]:
    return [prompt(f"g{i}", 40, n=4, **ENDS_AT_RANDOM) for i in range(count)]


def rounds(server: Server, run: str, prompts: list[dict[str, Any]], **body: Any) -> list[dict[str, Any]]:
    """Run rounds of one quota until nothing is left; the first carries the prompts."""
    replies = [server.rollout(run=run, prompts=prompts, **body)]
    while replies[-1]["carried"]["groups"]:
        replies.append(server.rollout(run=run, prompts=[], **body))
    return replies


def deliveries(reply: dict[str, Any]) -> list[Key]:
    return [(g["id"], g["incarnation"], s["index"]) for g in reply["finished"] for s in g["samples"]]


def test_sample_quota_is_exact(server: Server, run: str) -> None:
    """Exactly `quota` finished samples a round; the rest of a group comes later, same id, own index."""
    wanted = in_one_round(server, f"{run}-unbroken", groups_of_four(4))
    replies = rounds(server, run, groups_of_four(4), quota=3, quota_unit="sample")
    assert [len(deliveries(r)) for r in replies] == [3, 3, 3, 3, 3, 1]
    seen: dict[str, int] = {}
    for group in (g for r in replies for g in r["finished"]):
        assert group["incarnation"] == 0
        seen[group["id"]] = seen.get(group["id"], 0) + len(group["samples"])
        assert group["complete"] is (seen[group["id"]] == 4)
    assert len([g for r in replies for g in r["finished"]]) > 4, "no group was delivered in parts"
    assert_near(by_key(g for r in replies for g in r["finished"]), wanted, stock_noise(server), seeded=True)


def test_group_quota_delivers_whole_groups(server: Server, run: str) -> None:
    """Whole groups only; finished members of unfinished groups wait in the carry, without KV."""
    wanted = in_one_round(server, f"{run}-unbroken", groups_of_four(6))
    replies = rounds(server, run, groups_of_four(6), quota=1)
    assert [len(r["finished"]) for r in replies] == [1] * 6
    assert all(g["complete"] and len(g["samples"]) == 4 for r in replies for g in r["finished"])
    assert [r["carried"]["samples"] for r in replies] == [24 - 4 * (i + 1) for i in range(6)]
    assert_near(by_key(g for r in replies for g in r["finished"]), wanted, stock_noise(server), seeded=True)


def test_finished_members_hold_no_kv(server: Server, run: str) -> None:
    """Only the unfinished members of a group are partials."""
    server.rollout(run=run, prompts=groups_of_four(5), quota=1)
    samples = server.state()["samples"]
    assert samples["finished"] > 0
    assert samples["suspended"] == len(server.partials(run))
    assert samples["finished"] + samples["suspended"] == 16
    assert len(by_key(server.drain(run))) == 16


def test_quota_larger_than_the_work_ends_exhausted(server: Server, run: str) -> None:
    """The round ends when everything has finished, with `end_reason: exhausted`."""
    reply = server.rollout(run=run, prompts=[prompt("a", 4), prompt("b", 7)], quota=5)
    assert (reply["end_reason"], [g["id"] for g in reply["finished"]]) == ("exhausted", ["a", "b"])
    assert reply["carried"]["groups"] == 0


def test_empty_round_ends_at_once(server: Server, run: str) -> None:
    """Empty prompts and an empty carry: 200, exhausted, nothing finished, no forward."""
    count = Forwards(server)
    for quota in (1, None):
        reply = server.rollout(run=run, prompts=[], quota=quota)
        assert (reply["end_reason"], reply["finished"]) == ("exhausted", [])
    assert count.rows(decode=True) == count.rows(decode=False) == []


def test_null_quota_ends_with_the_last_sample(server: Server, run: str) -> None:
    """`quota: null` ends only by a stop or when everything has finished."""
    reply = server.rollout(run=run, prompts=[prompt(f"p{i}", 3 + 2 * i) for i in range(4)], quota=None)
    assert (reply["end_reason"], len(reply["finished"])) == ("exhausted", 4)


def counted(server: Server, run: str) -> int:
    return next((r["counted"] for r in server.state()["rounds"] if r["run"] == run), 0)


@pytest.mark.parametrize("deliver", [None, ["b", "unheard-of"], []])
def test_stop_delivers_finished_or_named_groups(server: Server, run: str, deliver: list[str] | None) -> None:
    """`stop` ends the round with the finished groups, or those it names; a second `stop` changes nothing."""
    prompts = [prompt("a", 3), prompt("b", 4), prompt("c", 5), *(prompt(f"long-{i}", 1500) for i in range(2))]
    body = {} if deliver is None else {"deliver": deliver}
    with server.slowed():
        round_ = BackgroundRound(server, run=run, round_id=f"{run}-r", prompts=prompts, quota=None)
        until(lambda: counted(server, run) == 3)
        server.post(f"/april/rounds/{run}-r/stop", body)
        reply = round_.reply()
    assert reply["end_reason"] == "stopped"
    assert [g["id"] for g in reply["finished"]] == (["a", "b", "c"] if deliver is None else deliver[:1])
    assert reply["carried"]["finished_groups"] == 3 - len(reply["finished"])
    assert server.post(f"/april/rounds/{run}-r/stop")["state"] == "ended"
    server.post(f"/april/rounds/{run}-unknown/stop", status=404)
    server.post("/april/drop", {"run": run, "ids": ["long-0", "long-1"]})
    left = [g["id"] for g in server.drain(run)]
    assert left == [i for i in "abc" if i not in [g["id"] for g in reply["finished"]]]


def test_stopped_samples_keep_their_tokens(overlap: Server, run: str) -> None:
    """After a stop at any point of the overlap loop, also with a step in flight, samples resume exactly."""
    prompts = [prompt(f"p{i}", 120, temperature=1.0) for i in range(4)]
    wanted = in_one_round(overlap, f"{run}-unbroken", prompts)
    groups: list[dict[str, Any]] = []
    carried = []
    for i in range(4):
        with overlap.slowed():
            round_ = BackgroundRound(overlap, run=run, round_id=f"{run}-{i}", prompts=[] if i else prompts, quota=None)
            until(lambda r=round_: overlap.state()["samples"]["running"] == 4 or r.done)
            overlap.post(f"/april/rounds/{run}-{i}/stop")
            reply = round_.reply()
        carried.append(reply["carried"].get("tokens", 0))
        groups += reply["finished"]
    assert carried[0] > 0
    assert carried[1] > carried[0]
    groups += overlap.drain(run)
    assert_near(by_key(groups), wanted, stock_noise(overlap), seeded=True)


@pytest.mark.parametrize("previews", [False, True])
def test_streamed_groups_say_whether_they_are_delivered(server: Server, run: str, previews: bool) -> None:
    """Previews come in finish order; twins finish in one step, so that there may be more of them than are delivered."""
    prompts = [prompt("early", 3, n=2), *(prompt(f"twin{i}", 9) for i in range(3)), prompt("never", 60)]
    *groups, summary = stream(server, run=run, prompts=prompts, quota=2, previews=previews)
    assert [(g["event"], g["delivered"]) for g in groups] == [("group", not previews)] * len(groups)
    shown = [g["id"] for g in groups]
    assert shown[:2] == ["early", summary["delivered"][1]["id"]]
    assert set(shown) <= {"early", *(f"twin{i}" for i in range(3))} if previews else len(shown) == 2
    assert (summary["event"], summary["end_reason"]) == ("round", "quota")
    assert [d["indices"] for d in summary["delivered"]] == [[0, 1], [0]]
    assert len(server.drain(run)) == 3
