"""KV that stays with a trajectory between two turns: what is prefilled, and that tokens are those of a replay."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import NORMAL, Pool
from tests.integration.test_kv_auto import CHEAP_COPIES, DEAR_COPIES
from tests.integration.test_trajectories import LENGTH, PROMPT, done, leg, open_round, record, without_kv
from tests.support.live import LiveServer, live_server, until
from tests.support.oracle import LOGPROB_LIMIT, Oracle, logprobs_of, processed


def turns(
    live: LiveServer,
    run: str,
    count: int,
    tool: list[int],
    after: dict[int, int] | None = None,
    prompt: list[int] = PROMPT,
) -> list[int]:
    """An agent of several turns, with a push of some seed after some of them; returns its whole history."""
    history = list(prompt)
    for i in range(count):
        answer = leg(live, run, "t", history, sampling_params=PARAMS)
        history += [*answer["output_ids"], *tool]
        if after is not None and i in after:
            live.push(after[i])
    return history


PARAMS: dict[str, Any] = {"temperature": 0.8, "sampling_seed": 41, "max_new_tokens": LENGTH, "ignore_eos": True}


def check_replay(live: LiveServer, known: dict[str, Any], *, kept: bool = True) -> None:
    """Every drawn token's logprob is that of Hugging Face forwards, which continue on the KV of the previous turn."""
    (branch,) = known["branches"]
    prompt = known["legs"][0]["prompt_ids"]
    output = branch["ids"][len(prompt) :]
    ends = iter(span["end"] - len(prompt) for span in branch["spans"])
    spans: list[dict[str, Any]] = []
    for one in known["legs"]:
        if spans and kept:  # an earlier turn may have computed the KV of its last token as well
            spans[-1]["end"] = one["reused"] + 1 - len(prompt)
        for span in one["spans"]:
            start, kv = (spans[-1]["end"], "kept" if kept else "fresh") if spans else (0, "fresh")
            spans.append({"start": start, "end": next(ends), "version": span["version"], "kv": kv})
    rows = processed(Oracle(live.policies).replay(prompt, output, spans), output, {"temperature": 0.8})
    expected = logprobs_of(rows, torch.tensor(output))
    for first, last in branch["drawn"]:
        got = torch.tensor(branch["logprobs"][first:last], dtype=torch.float64)
        error = float((expected[first - len(prompt) : last - len(prompt)] - got).abs().max())
        assert error < LOGPROB_LIMIT, f"logprobs of [{first}, {last}) are off by {error}"


def prefilled(live: LiveServer) -> int:
    """Tokens of all prefills so far."""
    return sum(f["tokens"] for f in live.server.forwards() if not f["decode"])


def test_eight_turns_and_two_pushes_prefill_only_what_is_new(live: LiveServer, run: str) -> None:
    before, v = prefilled(live), live.version
    turns(live, run, 8, [3, 4], {2: 1, 5: 2})
    known = record(live, run, "t")
    last = without_kv(live)
    assert [x["prefilled"] for x in known["legs"]] == [5] + [2 + last] * 7
    assert [x["reused"] for x in known["legs"]] == [0] + [5 + 12 * i + 2 * (i - 1) - last for i in range(1, 8)]
    assert prefilled(live) - before == 5 + (2 + last) * 7
    versions = [v] * 3 + [v + 1] * 3 + [v + 2] * 2
    assert [[(s["version"], s["kv"]) for s in x["spans"]] for x in known["legs"]] == [
        [(version, "fresh" if version == v else "kept")] for version in versions
    ]
    check_replay(live, known)
    assert live.server.http.get("/april/check").json() == {"ok": True, "problem": ""}


def test_a_long_tool_answer_is_prefilled_in_chunks(live: LiveServer, run: str) -> None:
    """Behind KV of an older version, which the radix tree does not have."""
    turns(live, run, 3, [1 + i % 50 for i in range(150)], {0: 1})
    known = record(live, run, "t")
    assert [x["prefilled"] for x in known["legs"]] == [5, *2 * [150 + without_kv(live)]]
    check_replay(live, known)


@pytest.mark.parametrize("pushed", [False, True])
def test_a_prompt_without_new_tokens_computes_the_last_one(live: LiveServer, run: str, pushed: bool) -> None:
    """An agent that lets the model continue an answer which was too long."""
    before, v = prefilled(live), live.version
    turns(live, run, 4, [], {0: 1, 2: 2} if pushed else None, prompt=[21 + pushed, *PROMPT[1:]])
    known = record(live, run, "t")
    assert [x["prefilled"] for x in known["legs"]] == [5, 1, 1, 1]
    assert prefilled(live) - before == 5 + 3
    assert [x["spans"][0]["version"] - v for x in known["legs"]] == ([0, 1, 1, 2] if pushed else [0] * 4)
    check_replay(live, known)
    assert live.server.http.get("/april/check").json() == {"ok": True, "problem": ""}


@pytest.mark.parametrize("pushed", [False, True])
def test_a_flush_moves_it_to_the_host(live: LiveServer, run: str, pushed: bool) -> None:
    history = turns(live, run, 1, [3], {0: 1} if pushed else None, prompt=[31 + pushed, *PROMPT[1:]])
    assert live.server.http.post("/flush_cache").status_code == 200
    state = live.server.state()
    last = without_kv(live)
    assert state["parked_tokens"] == state["tokens"]["host"] == 17 - last
    leg(live, run, "t", history)
    known = record(live, run, "t")
    assert [x["prefilled"] for x in known["legs"]] == [5, 1 + last]
    check_replay(live, known)


def test_little_host_memory_moves_it_to_disk(small: LiveServer, run: str) -> None:
    """The host's 146 tokens are too few for it."""
    v = small.version
    history = turns(small, run, 1, [3], {0: 1}, prompt=[1 + i % 50 for i in range(200)])
    assert small.server.http.post("/flush_cache").status_code == 200
    until(lambda: small.server.state()["tokens"]["disk"] >= 200, "it is on disk")
    leg(small, run, "t", history)
    known = record(small, run, "t")
    assert [x["prefilled"] for x in known["legs"]] == [200, 1 + without_kv(small)]
    assert [[(s["version"], s["kv"]) for s in x["spans"]] for x in known["legs"]] == [[(v, "fresh")], [(v + 1, "kept")]]
    check_replay(small, known)


@pytest.mark.parametrize(("rates", "copied"), [(DEAR_COPIES, False), (CHEAP_COPIES, True)])
def test_auto_takes_the_cheaper_option(live: LiveServer, run: str, rates: tuple[float, float], copied: bool) -> None:
    """After a push and a flush, KV on the host is copied back, or the leg is prefilled again."""
    with live.server.rates(*rates):
        reply = open_round(live, run, quota=1, kv="auto")
        history = turns(live, run, 1, [3], {0: 1}, prompt=[41 + copied, *PROMPT[1:]])
        assert live.server.http.post("/flush_cache").status_code == 200
        leg(live, run, "t", history)
        known = record(live, run, "t")
        assert [x["prefilled"] for x in known["legs"]] == [5, 1 + without_kv(live) if copied else len(history)]
        assert known["legs"][1]["spans"][0]["kv"] == ("kept" if copied else "fresh")
        check_replay(live, known, kept=copied)
        done(live, run, "t")
        live.result_of(reply)


@pytest.fixture
def capped(pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """64 tokens of parked KV, of 1,024 bytes each."""
    server = pool.get("capped", [*NORMAL, "--april-park-gb=0.000066"], "llama", forked=True)
    with live_server(server, lambda seed: models("llama", seed)) as live:
        yield live


def test_what_was_parked_first_goes_first_at_the_cap(capped: LiveServer, run: str) -> None:
    """Each trajectory parks 16 tokens."""
    histories = {}
    for name in map(str, range(6)):
        prompt = [int(name), *PROMPT]
        histories[name] = [*prompt, *leg(capped, run, name, prompt, length=11)["output_ids"], 3]
        assert capped.server.state()["parked_tokens"] <= 64
    assert capped.server.state()["parked_tokens"] == 64
    capped.push(1)
    for name, prefilled in {"5": 2, "0": 18}.items():
        leg(capped, run, name, histories[name])
        assert record(capped, run, name)["legs"][1]["prefilled"] == prefilled


def test_recompute_prefills_everything_after_a_push(live: LiveServer, run: str) -> None:
    reply = open_round(live, run, quota=1, kv="recompute")
    history = turns(live, run, 2, [3, 4], {1: 1})
    leg(live, run, "t", history)
    known = record(live, run, "t")
    assert [x["prefilled"] for x in known["legs"]] == [5, 2 + without_kv(live), len(history)]
    assert known["legs"][2]["spans"][0]["kv"] == "fresh"
    done(live, run, "t")
    live.result_of(reply)
    assert live.server.state()["parked_tokens"] == 0


def test_a_suspended_leg_keeps_what_it_was_prefilled_behind(live: LiveServer, run: str) -> None:
    """A push while the second leg decodes."""
    history = turns(live, run, 1, [3, 4], {0: 1})
    with live.server.slowed():
        before = live.decodes()
        answer = live.in_background(leg, live, run, "t", history, length=40)
        until(lambda: live.decodes() > before + 3, "the leg decodes")
        live.push(2)
    live.result_of(answer)
    known = record(live, run, "t")
    assert [x["prefilled"] for x in known["legs"]] == [5, 2 + without_kv(live)]
    assert [s["kv"] for s in known["legs"][1]["spans"]] == ["kept", "kept"]
    check_replay(live, known)


def test_memory_is_flat_under_small_caps(small: LiveServer, run: str) -> None:
    """Trajectories that are never ended share 400 tokens on the device and 292 on the host.

    `APRIL_TRAJECTORIES=300` runs as many.
    """
    for i in range(int(os.environ.get("APRIL_TRAJECTORIES", "40"))):
        history = [i, *PROMPT]  # equal prompts would share their pages
        for _ in range(3):
            history += leg(small, run, f"t{i}", history)["output_ids"]
    state = small.server.state()
    assert 0 < state["tokens"]["device"] + state["tokens"]["host"] <= 692
    assert small.server.http.get("/april/check").json()["ok"]
    small.server.post("/april/drop", {"run": run})
    state = small.server.state()
    assert state["parked_tokens"] == state["pool"]["held"] == sum(state["tokens"].values()) == 0
