"""`quota_mode: cohort` on the live server (`cohort-before-end`)."""

from tests.support.server import Server
from tests.support.workload import prompt


def ids(reply: dict) -> list[str]:
    return [group["id"] for group in reply["finished"]]


def test_cohort_delivers_groups_of_earlier_rounds_first(server: Server, run: str) -> None:
    """`first` delivers the groups that finish first; `cohort` delivers earlier rounds' groups first."""
    first = server.rollout(run=run, prompts=[prompt("a", 3), prompt("tail", 60)], quota=1, quota_mode="cohort")
    assert ids(first) == ["a"]
    overtaken = server.rollout(run=run, prompts=[prompt("b", 3)], quota=1)
    assert ids(overtaken) == ["b"]
    second = server.rollout(run=run, prompts=[prompt("c", 3), prompt("late", 90)], quota=1, quota_mode="cohort")
    assert (ids(second), second["end_reason"]) == (["tail"], "quota")
    assert second["carried"]["finished_groups"] == 1
    assert second["carried"]["samples"] == 2
    third = server.rollout(run=run, prompts=[], quota=1, quota_mode="cohort")
    assert ids(third) == ["c", "late"]


def test_cohort_rounds_two_allows_one_round_of_delay(server: Server, run: str) -> None:
    """With `cohort_rounds: 2`, groups of the next round may be delivered first, once."""
    body = {"run": run, "quota": 1, "quota_mode": "cohort", "cohort_rounds": 2}
    replies = [server.rollout(prompts=[prompt("a", 3), prompt("tail", 80)], **body)]
    replies += [server.rollout(prompts=[prompt(name, 3)], **body) for name in ("b", "c")]
    assert [ids(reply) for reply in replies] == [["a"], ["b"], ["tail"]]
    assert [g["id"] for g in server.drain(run)] == ["c"]
