"""Legs of trajectories, their record, and rounds that count trajectories (docs/trajectories.md)."""

import json
import re
from concurrent.futures import Future
from typing import Any

from sglang_april.adapter import versions
from tests.support.live import LiveServer, until

PROMPT = [9, 8, 7, 6, 5]
LENGTH = 12
USER = {"role": "user", "content": "1 2 3"}


def leg(
    live: LiveServer, run: str, name: str, ids: list[int], *, length: int = LENGTH, group: str = "", **fields: Any
) -> dict[str, Any]:
    """One turn of an agent."""
    headers = {"x-april-run": run, "x-april-trajectory": name} | ({"x-april-group": group} if group else {})
    params = {"temperature": 0.8, "sampling_seed": 41, "max_new_tokens": length, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params, **fields}
    answer = live.server.http.post("/generate", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def turn(live: LiveServer, run: str, name: str, **fields: Any) -> "Future[dict[str, Any]]":
    return live.in_background(leg, live, run, name, PROMPT, **fields)


def record(live: LiveServer, run: str, name: str, status: int = 200) -> dict[str, Any]:
    answer = live.server.http.get(f"/april/trajectories/{name}", params={"run": run})
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def open_round(live: LiveServer, run: str, **body: Any) -> "Future[dict[str, Any]]":
    """Open a round of trajectories, and return once it is open."""
    fields = {"run": run, "round_id": f"{run}-{body.get('quota')}", "quota_unit": "trajectory", **body}
    reply = live.in_background(live.server.rollout, **fields)
    until(lambda: reply.done() or fields["round_id"] in live.server.state()["http"]["rounds"], "the round is open")
    return reply


def done(live: LiveServer, run: str, *names: str, status: int = 200, **body: Any) -> dict[str, Any]:
    trajectories = {name: {"reward": 0.5} for name in names}
    return dict(
        live.server.post("/april/trajectories/done", {"run": run, "trajectories": trajectories, **body}, status=status)
    )


def without_kv(live: LiveServer) -> int:
    """How many tokens of a leg that its length has ended have no KV: the last one, unless a step has computed it.

    The overlap loop's next step does, except that of 0.5.23, which leaves out what the step before will end by length.
    """
    return 0 if live.server.state()["overlap"] and versions.installed()["sglang"] != "0.5.23" else 1


def pending(live: LiveServer, run: str) -> int:
    return int(live.server.state()["attached"].get(run, {}).get("samples", 0))


def mismatched(live: LiveServer) -> float:
    """Legs that the server's metric has counted."""
    found = re.search(r"sglang_april:mismatched_legs_total\{.*\} (\S+)", live.server.http.get("/metrics").text)
    assert found is not None
    return float(found[1])


def test_record_has_every_leg(live: LiveServer, run: str) -> None:
    """The second leg extends the first; the third edits the history, begins a branch, and reuses what is unchanged."""
    live.server.post("/flush_cache")  # an earlier test may have had the prompt
    counted = mismatched(live)
    first = leg(live, run, "t", PROMPT, return_logprob=True)
    history = [*PROMPT, *first["output_ids"], 3, 4]
    second = leg(live, run, "t", history, logprob_start_len=0)  # without return_logprob it has no effect
    assert "output_token_logprobs" not in second["meta_info"]
    edited = [*history[:10], 1, 2, 3]
    third = leg(live, run, "t", edited, return_logprob=True)
    known = record(live, run, "t")
    assert [x["parent"] for x in known["legs"]] == [None, 0, 0]
    assert [x["shared"] for x in known["legs"]] == [0, 17, 10]
    assert [x["prompt_ids"] for x in known["legs"]] == [PROMPT, [3, 4], [1, 2, 3]]
    # The second leg computes its own two tokens and those without KV, the third leg only its own three.
    last = without_kv(live)
    assert [x["prefilled"] for x in known["legs"]] == [5, 2 + last, 3]
    assert [x["reused"] for x in known["legs"]] == [0, 17 - last, 10]
    assert known["mismatches"] == live.server.state()["trajectories"][run]["mismatches"] == 1
    assert mismatched(live) - counted == 1
    assert [x["output_ids"] for x in known["legs"]] == [x["output_ids"] for x in (first, second, third)]
    for i, answer in ((0, first), (2, third)):
        asked = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
        assert known["legs"][i]["logprobs"] == asked
    assert all(len(x["logprobs"]) == LENGTH for x in known["legs"])
    assert [x["spans"] for x in known["legs"]] == [x["meta_info"]["april"]["spans"] for x in (first, second, third)]
    main, branch = known["branches"]
    assert (main["legs"], branch["legs"]) == ([0, 1], [0, 2])
    assert main["ids"] == [*history, *second["output_ids"]]
    assert branch["ids"] == [*edited, *third["output_ids"]]
    assert (main["shared"], branch["shared"]) == (0, 10)
    assert (main["drawn"], branch["drawn"]) == ([[5, 17], [19, 31]], [[5, 10], [13, 25]])
    assert main["logprobs"][5:17] == known["legs"][0]["logprobs"]
    assert branch["logprobs"][5:10] == known["legs"][0]["logprobs"][:5]
    assert main["logprobs"][:5] == [None] * 5
    assert known["state"] == "parked"
    assert record(live, run, "u", status=404)["error"]["field"] == "id"
    assert pending(live, run) == 0
    live.server.post("/april/drop", {"run": run})
    record(live, run, "t", status=404)


def test_a_request_that_sglang_refuses_is_no_leg(live: LiveServer, run: str) -> None:
    """It draws a token of another prompt for one whose grammar does not compile, and answers 400."""
    first = leg(live, run, "t", PROMPT, return_logprob=True)
    history = [*PROMPT, *first["output_ids"], 3]
    headers = {"x-april-run": run, "x-april-trajectory": "t"}
    wrong = {"max_new_tokens": 4, "json_schema": "{"}
    answer = live.server.http.post("/generate", json={"input_ids": history, "sampling_params": wrong}, headers=headers)
    assert answer.status_code == 400, answer.text
    second = leg(live, run, "t", history)
    known = record(live, run, "t")
    assert [x["output_ids"] for x in known["legs"]] == [x["output_ids"] for x in (first, second)]
    assert (known["legs"][1]["parent"], known["mismatches"]) == (0, 0)
    live.server.post("/april/drop", {"run": run})


def test_quota_suspends_the_other_trajectories(live: LiveServer, run: str) -> None:
    """The reply of a round comes with its quota; the next round continues the other legs."""
    alone = leg(live, run, "alone", PROMPT, length=40)["output_ids"]
    live.server.post("/april/drop", {"run": run})
    v = live.version
    with live.server.slowed():
        first = open_round(live, run, quota=1)
        short = turn(live, run, "short", length=4)
        long = [turn(live, run, f"long{i}", length=40) for i in range(2)]
        assert live.result_of(short)["output_ids"] == alone[:4]
        until(lambda: record(live, run, "long1")["state"] == "running", "the others run")
        answer = done(live, run, "short")
        assert (answer["done"], answer["quota"]) == (1, 1)
        reply = live.result_of(first)
        before = len(live.server.forwards())
        assert live.server.state()["samples"]["running"] == 0
        assert reply["end_reason"] == "quota"
        assert [(t["id"], t["reward"]) for t in reply["trajectories"]] == [("short", 0.5)]
        carried = {t["id"]: t for t in reply["carried"]["trajectories"]}
        assert {t["state"] for t in carried.values()} == {"pending"}
        assert carried.keys() == {"long0", "long1"}
        late = turn(live, run, "late", length=4)
        until(lambda: pending(live, run) == 3, "another request arrives")
        assert len(live.server.forwards()) == before
        assert not any(x.done() for x in (*long, late))
        live.push(1)
    second = open_round(live, run, quota=3)
    for x in long:
        result = live.result_of(x)
        assert result["output_ids"][:4] == alone[:4]
        assert [s["version"] for s in result["meta_info"]["april"]["spans"]] == [v, v + 1]
    live.result_of(late)
    done(live, run, "long0", "late")
    assert done(live, run, "short")["counted"] == 2
    done(live, run, "long1")
    reply = live.result_of(second)
    assert [t["id"] for t in reply["trajectories"]] == ["long0", "late", "long1"]
    assert reply["carried"]["trajectories"] == []
    assert reply["stats"]["delivered"]["trajectories"] == 3
    late_leg = {"x-april-run": run, "x-april-trajectory": "late"}
    refused = live.server.http.post("/generate", json={"input_ids": PROMPT}, headers=late_leg)
    assert refused.status_code == 400
    assert "has ended" in refused.text
    for route, prompt in (("completions", {"prompt": "1"}), ("chat/completions", {"messages": [USER]})):
        body = {"model": "m", "stream": True, "max_tokens": 4, **prompt}
        stream = live.server.http.post(f"/v1/{route}", json=body, headers=late_leg)
        error = json.loads(next(line for line in stream.iter_lines() if line).removeprefix("data: "))["error"]
        assert (error["code"], "has ended" in error["message"]) == (400, True)


def test_begun_trajectories_come_first(live: LiveServer, run: str) -> None:
    reply = open_round(live, run, quota=2, concurrency=1)
    with live.server.slowed():
        first = turn(live, run, "first", length=6)
        until(lambda: pending(live, run) == 1, "the first request arrives")
        others = [turn(live, run, f"new{i}", length=30) for i in range(2)]
        answer = live.result_of(first)
        second = live.in_background(leg, live, run, "first", [*PROMPT, *answer["output_ids"], 1], length=6)
        until(lambda: live.server.state()["samples"]["running"] == 1, "a new trajectory runs")
        live.result_of(second)
        assert sum(x.done() for x in others) <= 1
        done(live, run, "first")
    for x in others:
        live.result_of(x)
    done(live, run, "new1")
    assert [t["id"] for t in live.result_of(reply)["trajectories"]] == ["first", "new1"]
    live.server.post("/april/drop", {"run": run})


def test_groups_are_delivered_whole(live: LiveServer, run: str) -> None:
    reply = open_round(live, run, quota_unit="group", trajectories=True, n=2, quota=1)
    for name in ("a0", "b0", "a1", "b1"):
        leg(live, run, name, PROMPT, group=name[0], length=3)
    answer = done(live, run, "a0", "b0", reject=["a1"])
    assert (answer["counted"], answer["rejected"]) == (0, 1)
    assert done(live, run, reject=["a1"])["counted"] == 0
    assert done(live, run, "a1", status=409)["error"]["field"] == "trajectories"
    assert done(live, run, "a0", "unknown", status=404)["error"]["field"] == "trajectories"
    leg(live, run, "a2", PROMPT, group="a", length=3)
    done(live, run, "a2")
    ended = live.result_of(reply)
    assert [(t["id"], t["group"]) for t in ended["trajectories"]] == [("a0", "a"), ("a2", "a")]
    assert ended["rejected"] == ["a1"]
    assert [t["id"] for t in ended["carried"]["trajectories"]] == ["b0", "b1"]
    live.server.post("/april/drop", {"run": run})


def test_a_round_without_running_legs_holds_nothing(live: LiveServer, run: str) -> None:
    """While tools run: a weight call, a pause and a release of memory."""
    v = live.version
    reply = open_round(live, run, quota=1)
    answer = leg(live, run, "t", PROMPT)
    assert live.load(1)["success"]
    live.policies[v + 1] = live.model(1)
    live.server.post("/pause_generation", {"mode": "retract"})
    live.server.post("/continue_generation", {"torch_empty_cache": False})
    live.server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    late = live.in_background(leg, live, run, "t", [*PROMPT, *answer["output_ids"], 2])
    until(lambda: pending(live, run) == 1, "a request arrives meanwhile")
    assert not reply.done()
    live.server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert live.result_of(late)["meta_info"]["april"]["spans"][0]["version"] == v + 1
    done(live, run, "t")
    assert live.result_of(reply)["end_reason"] == "quota"


def test_a_run_that_asks_for_seeds(live: LiveServer, run: str) -> None:
    """Requests without a seed get one: the same tokens over a push of the same weights, and others for another seed."""
    params = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params}

    def ask(seed: str, name: str = "t") -> list[int]:
        headers = {"x-april-run": f"{run}-{seed}", "x-april-trajectory": name, "x-april-seed": seed}
        answer = live.server.http.post("/generate", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        live.server.post("/april/drop", {"run": f"{run}-{seed}"})
        return list(answer.json()["output_ids"])

    first = ask("7")
    assert ask("8") != first != ask("9", "u")
    with live.server.slowed():
        headers = {"x-april-run": run, "x-april-trajectory": "t", "x-april-seed": "7"}
        again = live.in_background(live.server.http.post, "/generate", json=body, headers=headers)
        until(lambda: live.running() == 1, "it runs")
        live.wait_decodes()
        live.push(0)
    answer = live.result_of(again).json()
    assert len(answer["meta_info"]["april"]["spans"]) == 2
    assert answer["output_ids"] == first
    refused = live.server.http.post("/generate", json=body, headers={"x-april-run": run, "x-april-seed": "x"})
    assert refused.status_code == 400
    assert "x-april-seed" in refused.text


def test_beside_a_round_of_prompts(live: LiveServer, run: str) -> None:
    """The batch round of another run ends by its own quota, and the legs keep running."""
    with live.server.slowed():
        reply = open_round(live, run, quota=1)
        answer = turn(live, run, "t", length=40)
        until(lambda: live.running() == 1, "the leg runs")
        prompts = [
            {"id": f"p{i}", "input_ids": [i + 1], "sampling_params": {"max_new_tokens": 4 + 60 * i}} for i in (0, 1)
        ]
        batch = live.server.rollout(run=f"{run}-batch", prompts=prompts, quota=1)
        assert batch["end_reason"] == "quota"
        assert not answer.done()
        until(lambda: live.running() == 1, "the leg runs on")
        live.server.post("/april/drop", {"run": f"{run}-batch"})
    live.result_of(answer)
    done(live, run, "t")
    assert [t["id"] for t in live.result_of(reply)["trajectories"]] == ["t"]


def test_abort_all_ends_the_rounds_of_all_runs(live: LiveServer, run: str) -> None:
    """Whoever sends it. A client that aborts by `rid` ends none."""
    body = {"rid": "stock", "input_ids": [1], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    prompts = [{"id": "p", "input_ids": [2], "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}]
    with live.server.slowed():
        legs = open_round(live, run, quota=1)
        leg_of_t = turn(live, run, "t", length=60)
        batch = live.open(run=f"{run}-batch", prompts=prompts, quota=1)
        stock = live.in_background(live.server.post, "/generate", body)
        until(lambda: live.server.forwards()[-1]["rows"] == 3, "all run")
        live.server.post("/abort_request", {"rid": "stock"})
        assert live.result_of(stock)["meta_info"]["finish_reason"]["type"] == "abort"
        assert (live.running(), len(live.server.state()["rounds"])) == (2, 2)
        live.server.post("/abort_request", {"abort_all": True})
        ended, other = live.result_of(legs), live.result_of(batch)
        aborted = live.result_of(leg_of_t)
    assert (ended["end_reason"], other["end_reason"]) == ("stopped", "stopped")
    assert [t["id"] for t in ended["carried"]["trajectories"]] == ["t"]
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert record(live, run, "t")["legs"][0]["output_ids"] == aborted["output_ids"]
    assert [len(g["samples"]) for g in live.server.drain(f"{run}-batch")] == [1]


def test_done_aborts_a_pending_leg(live: LiveServer, run: str) -> None:
    reply = open_round(live, run, quota=1)
    with live.server.slowed():
        answer = turn(live, run, "t", length=60)
        until(lambda: live.running() == 1, "the leg runs")
        live.wait_decodes()
        done(live, run, "t")
        aborted = live.result_of(answer)
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    (delivered,) = live.result_of(reply)["trajectories"]
    assert delivered["legs"][0]["output_ids"] == aborted["output_ids"]
    assert 0 < len(aborted["output_ids"]) < 60
