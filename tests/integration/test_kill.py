"""kill -9 and a restart with the same journal and disk tier (`restart-loses-nothing`)."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import NORMAL, Pool
from tests.support.compare import Key, assert_near, by_key, stock_noise
from tests.support.kills import TIMEOUT_S, KillScenario, content
from tests.support.live import until
from tests.support.oracle import LOGPROB_LIMIT, Oracle, logprobs_of, processed
from tests.support.server import Server
from tests.support.workload import prompt

pytestmark = pytest.mark.timeout(1800)
"""Five server starts, which are slow on a busy machine."""

RANDOM_KILLS = 2
"""In addition to one at a known moment; `make soak` runs more."""

LENGTH = 800
WORDS = "[ab]{400,410}"
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0},
    "bias": {"temperature": 0.8, "logit_bias": {"7": 2.0, "300": -3.0}},
    "top_p": {"temperature": 0.8, "top_p": 0.8},
    "additive": {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.3},
}


@pytest.fixture
def journalled(pool: Pool, tmp_path: Path) -> Iterator[Server]:
    """A server with an empty journal that no other test shares."""
    flags = [*NORMAL, "--grammar-backend=llguidance", f"--april-journal={tmp_path / 'journal'}"]
    server = pool.get("journal", flags, forked=True)
    yield server
    server.stop()


def test_kills_at_known_and_random_moments_lose_and_repeat_nothing(
    journalled: Server, models: Callable[[str, int], Path], run: str
) -> None:
    partials_replies_and_open_rounds_come_back(journalled, models, f"{run}-known")
    scenario = KillScenario(journalled, lambda seed: models("qwen3", seed), seed=1, name=run)
    scenario.run(RANDOM_KILLS)
    assert scenario.kills == RANDOM_KILLS
    assert scenario.replayed
    assert scenario.warnings == 0
    kv_comes_back_from_the_disk(journalled, models, f"{run}-disk")
    rounds = sum(map(len, scenario.rounds.values()))
    print(f"{scenario.kills} kills, {rounds} rounds, {len(scenario.groups)} groups delivered")


def partials_replies_and_open_rounds_come_back(server: Server, models: Callable[[str, int], Path], run: str) -> None:
    """Kill with samples of all kinds suspended under two policies and a round open: recorded tokens stay."""
    kinds = [prompt(name, LENGTH, n=2, top_logprobs_num=2, **given) for name, given in PARAMS.items()]
    grammar = prompt("grammar", LENGTH, regex=WORDS, temperature=1.0)
    server.rollout(run=run, prompts=[*kinds, grammar, prompt("a", 20)], quota=1)
    server.push(models("qwen3", 1))
    last = server.rollout(
        run=run, round_id=f"{run}-last", prompts=[prompt("b", 20)], quota=1, kv="recompute", proximal=True
    )
    before = {(p["id"], p["index"]): p for p in server.partials(run)}
    assert len(before) == 2 * len(kinds) + 1
    requested = {
        "run": run,
        "round_id": f"{run}-open",
        "prompts": [prompt("c", 1900)],
        "quota": None,
        "max_staleness": None,
        "proximal": True,  # the recompute after the restart collects again
    }
    scenario = KillScenario(server, lambda seed: models("qwen3", seed), seed=0)
    with scenario.in_background(lambda: scenario.call("POST", "/april/rollout", requested)) as reply:
        until(lambda: reply.done() or server.state()["samples"]["running"] > len(before), "the round runs")
        scenario.restart()
        assert {(p["id"], p["index"]): p["tokens"] for p in server.partials(run) if p["id"] != "c"} == {
            key: p["tokens"] for key, p in before.items()
        }
        state = server.state()
        assert (state["policy_version"], state["samples"]["running"], list(state["http"]["rounds"])) == (
            1,
            0,
            [f"{run}-open"],
        )
        assert content(server.http.get(f"/april/rounds/{run}-last").json()) == content(last)
        refused = server.http.post(
            "/april/rollout", json={**requested, "run": f"{run}-other", "round_id": f"{run}-other"}
        )
        assert "name the version" in refused.json()["error"]["reason"]
        assert [cached_tokens(server), cached_tokens(server)][1] > 0
        server.push(models("qwen3", 1), version=1, flush=False)
        assert cached_tokens(server) == 0, "a prefix of unnamed weights was reused"
        scenario.up.set()
        server.post("/april/drop", {"run": run, "ids": ["c"]})
        groups = {g["id"]: g for g in reply.result(TIMEOUT_S).json()["finished"]}
    samples = by_key(groups.values())
    oracle = Oracle({0: models("qwen3", 0), 1: models("qwen3", 1)})
    for name, params in PARAMS.items():
        oracle.check(groups[name], params)
    for (name, _, index), sample in samples.items():
        known = before[name, index]
        assert sample["spans"][0] == {"start": 0, "end": known["spans"][0][1], "version": 0, "kv": "fresh"}
        assert sample["spans"][-1]["start"] <= known["tokens"]
        if name != "grammar":
            assert [len(row) for row in sample["top_logprobs"]] == [2] * LENGTH
        if name in ("plain", "bias"):
            check_proximal(oracle, groups[name], sample, PARAMS[name], known["spans"][0][1])
    assert re.fullmatch(WORDS, samples["grammar", 0, 0]["text"])


def kv_comes_back_from_the_disk(server: Server, models: Callable[[str, int], Path], run: str) -> None:
    """Kill between two policies: KV on disk is kept KV of the older one after the restart.

    A sample whose file has a flipped byte (counted) and a sample with a grammar are prefilled again.
    """
    first = server.state()["policy_version"]
    policies = {first + i: models("qwen3", (first + i) % 2) for i in range(4)}
    leave_on_disk(server, f"{run}-whole")
    server.push(policies[first + 1])
    wanted = by_key(server.drain(f"{run}-whole"))
    server.push(policies[first + 2])
    leave_on_disk(server, run)
    server.push(policies[first + 3], flush=False)
    before = {(p["id"], 0, p["index"]): p for p in server.partials(run)}
    assert {p["tier"] for p in before.values()} == {"disk"}
    server.stop()
    flip_a_byte(server.folder / "disk")
    server.spawn()
    server.wait()
    after = {(p["id"], 0, p["index"]): p for p in server.partials(run)}
    assert {key: p["tokens"] for key, p in after.items()} == {key: p["tokens"] for key, p in before.items()}
    again = {key for key, p in after.items() if p["tier"] == "none"}
    damaged = again - {("grammar", 0, 0)}
    assert (len(damaged), len(again)) == (1, 2)
    assert {after[key]["tier"] for key in after.keys() - again} == {"disk"}
    store = server.state()["store"]
    assert (store["lost"], "damaged" in store["last_failure"]) == (1, True), store
    server.push(policies[first + 3], version=first + 3)
    reply = server.rollout(run=run, prompts=[], quota=None)
    stats = reply["stats"]
    assert (stats["resumed_kept"], stats["resumed_recomputed"], stats["kv_lost"]) == (len(before) - 2, 2, 1)
    assert stats["reprefilled_tokens"] == sum(3 + before[key]["tokens"] for key in again)
    samples = by_key(reply["finished"])
    for key, sample in samples.items():
        spans = [(span["start"], span["version"], span["kv"]) for span in sample["spans"]]
        how = "recomputed" if key in again else "kept"
        assert spans == [(0, first + 2, "fresh"), (before[key]["tokens"], first + 3, how)]
    for name, seeded in (("plain", True), ("greedy", False)):
        keys = [key for key in wanted if key[0] == name and key not in damaged]
        assert_near(only(samples, keys), only(wanted, keys), stock_noise(server), seeded=seeded)
    oracle = Oracle(policies)
    for group in reply["finished"]:
        if group["id"] != "grammar":
            oracle.check(group, PARAMS[group["id"]])
    assert re.fullmatch(WORDS, samples["grammar", 0, 0]["text"])


def leave_on_disk(server: Server, run: str) -> None:
    """Samples of several kinds, of the same tokens under the same policy in any run, suspended; files are written."""
    kinds = [prompt(name, LENGTH, n=n, **PARAMS[name]) for name, n in (("plain", 3), ("greedy", 1), ("additive", 1))]
    grammar = prompt("grammar", LENGTH, regex=WORDS, temperature=1.0)
    server.rollout(run=run, prompts=[*kinds, grammar, prompt("short", 40)], quota=1, tier="disk")
    until(lambda: not server.state()["store"]["in_flight"], "all files are written")


def flip_a_byte(folder: Path) -> None:
    """In the middle of a file: of its pages. Not of the sample with a grammar, whose name its header has."""
    path = next(path for path in sorted(folder.glob("*.kv")) if b"grammar" not in path.read_bytes()[:500])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def only(samples: dict[Key, dict[str, Any]], keys: list[Key]) -> dict[Key, dict[str, Any]]:
    return {key: samples[key] for key in keys}


def cached_tokens(server: Server) -> int:
    """Return the cached tokens of a fixed prompt on `/generate`."""
    body = {"input_ids": list(range(30, 62)), "sampling_params": {"max_new_tokens": 2}}
    return int(server.post("/generate", body)["meta_info"]["cached_tokens"])


def check_proximal(
    oracle: Oracle, group: dict[str, Any], sample: dict[str, Any], params: dict[str, Any], old: int
) -> None:
    """Check the proximal logprobs of the recompute after the restart."""
    import torch

    output = list(sample["output_ids"])
    rows = processed(oracle.logits(list(group["prompt_ids"]), output, 1), output, params)
    expected = logprobs_of(rows, torch.tensor(output))[:old].tolist()
    assert sample["proximal_version"] == 1
    assert max(abs(a - b) for a, b in zip(sample["proximal_logprobs"][:old], expected, strict=True)) < LOGPROB_LIMIT
