"""S8 on the live server: kill -9, and a restart with the same journal."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import NORMAL, Pool
from tests.support.compare import by_key
from tests.support.kills import PATIENCE_S, Story, content
from tests.support.live import until
from tests.support.oracle import LOGPROB_LIMIT, Oracle, logprobs_of, processed
from tests.support.server import Server
from tests.support.workload import prompt

pytestmark = pytest.mark.timeout(1800)
"""Four starts of a server, which on a busy machine take their time."""

RANDOM_KILLS = 2
"""Beside the one at a known moment; `make soak` has more."""

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
    """A server of this test's own, with an empty journal: nobody else may have it killed."""
    flags = [*NORMAL, "--grammar-backend=llguidance", f"--april-journal={tmp_path / 'journal'}"]
    server = pool.get("journal", flags)
    yield server
    server.stop()


def test_killed_at_a_known_moment_and_at_any_nothing_is_lost_and_nothing_comes_twice(
    journalled: Server, models: Callable[[str, int], Path], run: str
) -> None:
    partials_replies_and_open_rounds_come_back(journalled, models, f"{run}-known")
    story = Story(journalled, lambda seed: models("qwen3", seed), seed=1, name=run)
    story.tell(RANDOM_KILLS)
    assert story.kills == RANDOM_KILLS
    assert story.replayed
    assert story.warnings == 0
    print(f"{story.kills} kills, {sum(map(len, story.rounds.values()))} rounds, {len(story.groups)} groups delivered")


def partials_replies_and_open_rounds_come_back(server: Server, models: Callable[[str, int], Path], run: str) -> None:
    """Samples of all kinds, suspended under two policies, then in the middle of a round: the tokens on record stay."""
    kinds = [prompt(name, LENGTH, n=2, top_logprobs_num=2, **given) for name, given in PARAMS.items()]
    grammar = prompt("grammar", LENGTH, regex=WORDS, temperature=1.0)
    server.rollout(run=run, prompts=[*kinds, grammar, prompt("a", 20)], quota=1)
    server.push(models("qwen3", 1))
    last = server.rollout(
        run=run, round_id=f"{run}-last", prompts=[prompt("b", 20)], quota=1, kv="recompute", proximal=True
    )
    before = {(p["id"], p["index"]): p for p in server.partials(run)}
    assert len(before) == 2 * len(kinds) + 1
    asked = {
        "run": run,
        "round_id": f"{run}-open",
        "prompts": [prompt("c", 1900)],
        "quota": None,
        "max_staleness": None,
    }
    story = Story(server, lambda seed: models("qwen3", seed), seed=0)
    with story.beside(lambda: story.call("POST", "/april/rollout", asked)) as reply:
        until(lambda: reply.done() or server.state()["samples"]["running"] > len(before), "the round runs")
        story.restart()
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
        refused = server.http.post("/april/rollout", json={**asked, "run": f"{run}-other", "round_id": f"{run}-other"})
        assert "name the version" in refused.json()["error"]["reason"]
        assert [cached_tokens(server), cached_tokens(server)][1] > 0
        server.push(models("qwen3", 1), version=1, flush=False)
        assert cached_tokens(server) == 0, "KV of weights that nobody had named"
        story.up.set()
        server.post("/april/drop", {"run": run, "ids": ["c"]})
        groups = {g["id"]: g for g in reply.result(PATIENCE_S).json()["finished"]}
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


def cached_tokens(server: Server) -> int:
    """Of one and the same prompt to SGLang's own route."""
    body = {"input_ids": list(range(30, 62)), "sampling_params": {"max_new_tokens": 2}}
    return int(server.post("/generate", body)["meta_info"]["cached_tokens"])


def check_proximal(
    oracle: Oracle, group: dict[str, Any], sample: dict[str, Any], params: dict[str, Any], old: int
) -> None:
    """What a recompute had said of the old tokens before the server died."""
    import torch

    output = list(sample["output_ids"])
    rows = processed(oracle.logits(list(group["prompt_ids"]), output, 1), output, params)
    expected = logprobs_of(rows, torch.tensor(output))[:old].tolist()
    assert sample["proximal_version"] == 1
    assert max(abs(a - b) for a, b in zip(sample["proximal_logprobs"][:old], expected, strict=True)) < LOGPROB_LIMIT
