"""Resume on SGLang's other pool layouts: without a radix tree, and with pages of sixteen tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_april.api.types import RUN
from tests.integration.conftest import NORMAL, OVERLAP, Pool
from tests.integration.test_trajectories import leg, record
from tests.support.background import BackgroundRound
from tests.support.compare import assert_same
from tests.support.live import LiveServer, live_server, until
from tests.support.server import SLOTS
from tests.support.workload import in_one_round, in_rounds, prompt, stoppers, token_ids

PAGED = "--page-size=16"
SHAPES = {
    "treeless": ([*NORMAL, "--disable-radix-cache", "--enable-priority-scheduling"], "qwen3"),
    "paged": ([*OVERLAP, PAGED, "--enable-priority-scheduling"], "llama"),
}
STOPS = [5, 11, 16, 22]
PARAMS: dict[str, Any] = {"temperature": 0.8}
LEG = {**PARAMS, "sampling_seed": 41}


@pytest.fixture(params=SHAPES)
def shaped(request: pytest.FixtureRequest, pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    flags, family = SHAPES[request.param]
    with live_server(pool.get(request.param, flags, family, forked=True), lambda seed: models(family, seed)) as live:
        yield live


def workload() -> list[dict[str, Any]]:
    """Prompts that end inside a page, at its end, and in another chunk; members of a group share whole pages."""
    lengths = {"inside": 21, "whole": 32, "chunked": 100}
    groups = [prompt(name, 40, ids=token_ids(n, n), n=2, **PARAMS) for name, n in lengths.items()]
    return [*stoppers(STOPS), *groups]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_resume_bit_for_bit(shaped: LiveServer, run: str, tier: str) -> None:
    """Admission stays open, and all memory is freed."""
    server = shaped.server
    wanted = in_one_round(server, f"{run}-unbroken", workload())
    samples, replies = in_rounds(server, run, workload(), len(STOPS), tier=tier)
    assert sum(r["stats"]["resumed_kept"] for r in replies) == 9 + 8 + 7 + 6
    assert sum(r["stats"]["reprefilled_tokens"] for r in replies) == 0
    assert_same(samples, wanted)
    at_rest(shaped)


def test_tokens_stay_exact_across_pushes_flushes_and_recomputes(shaped: LiveServer, run: str) -> None:
    """Kept KV under a new policy, a flush, then a recompute: every token matches its replay."""
    server, v = shaped.server, shaped.version
    groups = server.rollout(run=run, prompts=workload(), quota=1)["finished"]
    shaped.push(1, flush=False)
    groups += server.rollout(run=run, prompts=[], quota=1, kv="keep")["finished"]
    server.post("/flush_cache")
    groups += server.rollout(run=run, prompts=[], quota=1, kv="keep")["finished"]
    shaped.push(0, flush=True)
    groups += server.drain(run, kv="recompute")
    shaped.check(groups, {g["id"]: PARAMS if not g["id"].startswith("stop") else {} for g in groups})
    spans = [[(s["version"], s["kv"]) for s in x["spans"]] for g in groups if g["id"] == "inside" for x in g["samples"]]
    assert spans == [[(v, "fresh"), (v + 1, "kept"), (v + 2, "recomputed")]] * 2
    at_rest(shaped)


def test_preempted_sample_is_recomputed_and_reported(shaped: LiveServer, run: str) -> None:
    """SGLang retracts a rollout sample for a request of higher priority when all slots are taken."""
    server = shaped.server
    prompts = [prompt(f"p{i}", 150, ids=16, **PARAMS) for i in range(SLOTS)]
    rounds = BackgroundRound(server, run=run, prompts=prompts, quota=None)
    until(lambda: server.forwards() and server.forwards()[-1]["rows"] == SLOTS, "all slots are taken")
    urgent = {"input_ids": [7] * 9, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "priority": 5}
    assert len(server.post("/generate", urgent)["output_ids"]) == 3
    reply = rounds.reply()
    assert reply["stats"]["retracted"] >= 1
    assert reply["stats"]["reprefilled_tokens"] > 0
    kinds = {tuple(span["kv"] for span in x["spans"]) for g in reply["finished"] for x in g["samples"]}
    assert kinds == {("fresh",), ("fresh", "recomputed")}
    shaped.check(reply["finished"], {g["id"]: PARAMS for g in reply["finished"]})
    at_rest(shaped)


def test_a_request_that_is_preempted_in_vain_keeps_its_turn(
    pool: Pool, models: Callable[[str, int], Path], run: str
) -> None:
    """SGLang preempts before it knows how long the new prompt is, which does not fit, and forgets what it preempted."""
    flags = [*NORMAL, "--max-total-tokens=1000", "--max-running-requests=2", "--enable-priority-scheduling"]
    with live_server(pool.get("two rows", flags, forked=True), lambda seed: models("qwen3", seed)) as live:

        def ask(ids: int, tokens: int, **fields: Any) -> Any:
            params = {"max_new_tokens": tokens, "ignore_eos": True, **fields.pop("sampling_params", {})}
            return live.server.post(
                "/generate", {"input_ids": token_ids(ids, ids), "sampling_params": params, **fields}
            )

        with live.server.slowed():
            low = live.in_background(ask, 10, 95, sampling_params={"custom_params": {RUN: run}})
            until(lambda: live.running() == 1, "it runs")
            large = live.in_background(ask, 460, 60, priority=5)
            until(lambda: live.server.forwards()[-1]["rows"] == 2, "both run")
            urgent = live.in_background(ask, 515, 8, priority=5)
        lengths = [len(live.result_of(answer)["output_ids"]) for answer in (large, urgent)]
        answer = live.result_of(low)
    assert lengths == [60, 8]
    assert len(answer["output_ids"]) == 95
    assert [span["kv"] for span in answer["meta_info"]["april"]["spans"]] == ["fresh", "recomputed"]
    live.server.stop()


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("added", [[], [3]], ids=["nothing", "token"])
def test_a_leg_continues_parked_kv(shaped: LiveServer, run: str, added: list[int], pushed: bool) -> None:
    """The first leg ends at the end of a page; a prompt without new tokens computes that page again."""
    ids = token_ids(20, 90 + pushed)
    wanted = leg(shaped, f"{run}-unbroken", "t", ids, length=24)["output_ids"]
    shaped.server.post("/april/drop", {"run": f"{run}-unbroken"})
    stop = {**LEG, "max_new_tokens": 24, "ignore_eos": False, "stop_token_ids": [wanted[11]]}
    history = [*ids, *leg(shaped, run, "t", ids, sampling_params=stop)["output_ids"], *added]
    assert len(history) == 32 + len(added)
    if pushed:
        shaped.push(1)
    second = leg(shaped, run, "t", history)
    leg(shaped, run, "t", [*history, *second["output_ids"], 4])
    if not (pushed or added):
        assert (history + second["output_ids"])[: 20 + 24] == ids + wanted
    with_kv = min(32 if shaped.server.state()["overlap"] else 31, len(history) - 1)  # the next step computes the last
    prefix = with_kv // 16 * 16 if PAGED in shaped.server.flags else with_kv
    assert record(shaped, run, "t")["legs"][1]["prefilled"] == len(history) - prefix
    shaped.server.post("/april/drop", {"run": run})
    at_rest(shaped)


def test_a_leg_is_prefilled_in_chunks_behind_parked_kv(shaped: LiveServer, run: str) -> None:
    """All of them with `ignore_eos`, for which SGLang has separate code where there is no tree."""
    ids = token_ids(20, 70)
    history = [*ids, *leg(shaped, run, "t", ids, length=24)["output_ids"], *token_ids(200, 71)]
    leg(shaped, run, "t", history)
    with_kv = 20 + 24 - (0 if shaped.server.state()["overlap"] else 1)
    prefix = with_kv // 16 * 16 if PAGED in shaped.server.flags else with_kv
    assert record(shaped, run, "t")["legs"][1]["prefilled"] == len(history) - prefix
    shaped.server.post("/april/drop", {"run": run})
    at_rest(shaped)


def at_rest(live: LiveServer) -> None:
    """Assert that no sample is left and that every pool token is free or in the tree."""
    state = live.server.state()
    assert (state["closed"], sum(state["samples"].values()), state["tokens"]["device"]) == ("", 0, 0)
    pool = until(lambda: (p := live.server.state()["pool"])["running"] == 0 and p, "nothing runs")
    assert pool["available"] + pool["evictable"] + pool["protected"] == pool["total"]


def test_group_members_share_prompt_kv_where_the_pool_allows(shaped: LiveServer, run: str) -> None:
    """With pages of sixteen, only members whose last prompt token starts a page share; without a tree, none do."""
    params = {**PARAMS, "top_p": 0.9}
    prompts = [prompt(f"p{n}", 9, ids=token_ids(n, n), n=3, **params) for n in (16, 17, 18, 33)]
    reply = shaped.server.rollout(run=run, prompts=prompts, quota=None)
    paged = PAGED in shaped.server.flags
    assert reply["stats"]["started_on_prompt_kv"] == (2 * 2 if paged else 0)
    shaped.check(reply["finished"], dict.fromkeys(("p16", "p17", "p18", "p33"), params))
