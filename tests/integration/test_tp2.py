"""Two ranks on the CPU decide alike at every step (`rank-determinism`)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_attached import IDS, check_tokens
from tests.integration.test_trajectories import PROMPT, done, leg, open_round
from tests.support.live import LiveServer, live_server, until
from tests.support.server import Server
from tests.support.workload import prompt

ROUNDS = 20
KV = ("keep", "auto", "recompute")
PARAMS: dict[str, Any] = {"temperature": 0.8}


@pytest.fixture
def two_ranks(tp2: Server, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    with live_server(tp2, lambda seed: models("llama", seed)) as live:
        yield live


def digests(live: LiveServer) -> list[list[str]]:
    """Lines of each rank: step number and a hash of all decisions so far."""
    folder = Path(live.server.env["SGLANG_APRIL_DIGEST"])
    return [(folder / f"rank{rank}.log").read_text().splitlines() for rank in (0, 1)]


def between(live: LiveServer, run: str, i: int) -> None:
    """What happens after round `i`."""
    server = live.server
    match i % 5:
        case 0:
            live.push(1 + i // 5 % 2, flush=i % 2 == 0)
        case 1:
            server.post("/flush_cache")
        case 2:
            server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
            server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        case 3:
            server.post("/april/drop", {"run": run, "ids": [f"p{i}-1"]})


def inside(live: LiveServer, run: str, i: int, reply: Any) -> None:
    """What happens while round `i` is open."""
    server = live.server
    match i % 4:
        case 0:
            live.push(i % 3)
        case 1:
            server.post("/pause_generation", {"mode": ["in_place", "retract", "abort"][i % 3]})
            server.post("/continue_generation", {"torch_empty_cache": False})
        case 2:
            server.post("/flush_cache")
        case 3:
            server.post("/abort_request", {"abort_all": True})
    until(lambda: live.running() or reply.done(), "the round runs or has ended")


def test_both_ranks_decide_alike_over_twenty_rounds(two_ranks: LiveServer, run: str) -> None:
    """Suspends, resumes, pushes, flushes, pauses, releases, drops, aborts and retracts: equal digests at every step."""
    server, groups = two_ranks.server, []
    assert server.state()["kv_cost"]["tiers"].keys() == {"host", "disk"}, "rates of both ranks"
    for i in range(ROUNDS):
        prompts = [prompt(f"p{i}-{j}", 6 + 3 * j, n=2, **PARAMS) for j in range(4)]
        tier = ["auto", "device", "host", "none"][i % 4]
        body = {"run": run, "prompts": prompts, "quota": 3, "tier": tier, "kv": KV[i % 3]}
        if i % 2:
            groups += server.rollout(**body)["finished"]
        else:
            with server.slowed(0.05):
                reply = two_ranks.in_background(server.rollout, **body)
                until(lambda reply=reply: two_ranks.running() or reply.done(), "the round runs")
                inside(two_ranks, run, i // 2, reply)
            groups += two_ranks.result_of(reply)["finished"]
        between(two_ranks, run, i)
    groups += server.drain(run)
    assert len({(g["id"], g["incarnation"]) for g in groups}) == len(groups)
    two_ranks.check(groups, {g["id"]: PARAMS for g in groups})
    first = decided_alike(two_ranks)
    assert len({line.split()[1] for line in first}) > 2 * ROUNDS, "the digest does not move with the decisions"


def decided_alike(live: LiveServer) -> list[str]:
    """Every step so far, on both ranks."""
    until(lambda: len({lines[-1].split()[1] for lines in digests(live)}) == 1, "both ranks have decided the same")
    first, second = digests(live)
    different = [pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]]
    assert not different, f"the ranks differ at {different[0]}"
    return first


def suspended(live: LiveServer, run: str, tier: str) -> dict[str, Any]:
    """A round that leaves eight samples or more, in a tier if they have KV (SGLang has just retracted some); its reply.

    Prompts of three tokens: nothing is stored once for two.
    """
    prompts = [*(prompt(f"p{j}", 60, n=2, **PARAMS) for j in range(4)), prompt("short", 12, **PARAMS)]
    return dict(live.server.rollout(run=run, prompts=prompts, quota=1, tier=tier))


def store(live: LiveServer) -> dict[str, Any]:
    return dict(live.server.state()["store"])


def on_tier(live: LiveServer, run: str, tier: str) -> int:
    return sum(p["tier"] == tier for p in live.server.partials(run))


def finish(live: LiveServer, run: str, before: dict[str, Any]) -> dict[str, Any]:
    """Finish what a round left: check that all samples are delivered with the right tokens. Returns the stats."""
    reply = live.server.rollout(run=run, prompts=[], quota=None)
    groups = before["finished"] + reply["finished"]
    assert sorted((g["id"], len(g["samples"])) for g in groups) == [*((f"p{j}", 2) for j in range(4)), ("short", 1)]
    live.check(groups, {g["id"]: PARAMS for g in groups})
    decided_alike(live)
    return dict(reply["stats"])


def test_full_disk_on_one_rank_fails_the_copies_of_both(two_ranks: LiveServer, run: str) -> None:
    """Copies that rank 1 could not write are discarded on rank 0, with their files."""
    lost = store(two_ranks)["lost"]
    with two_ranks.server.fault("full disk"):
        left = suspended(two_ranks, run, "disk")
        assert left["carried"]["tokens_by_tier"]["disk"] > 0
        until(lambda: not store(two_ranks)["in_flight"], "all copies have failed")
    lost = store(two_ranks)["lost"] - lost
    assert lost > 0
    assert "rank 1: OSError: [Errno 28]" in store(two_ranks)["last_failure"]
    assert {p["tier"] for p in two_ranks.server.partials(run)} == {"none"}
    assert finish(two_ranks, run, left)["kv_lost"] == lost
    until(lambda: not list((two_ranks.server.folder / "disk").glob("*.kv")), "no file is left")


def test_corrupt_page_on_one_rank_makes_both_recompute(two_ranks: LiveServer, run: str) -> None:
    with two_ranks.server.fault("flipped bit"):
        left = suspended(two_ranks, run, "host")
        until(lambda: not store(two_ranks)["in_flight"], "all copies are made")
    damaged = on_tier(two_ranks, run, "host")
    assert damaged > 0
    stats = finish(two_ranks, run, left)
    assert (stats["kv_lost"], stats["resumed_kept"]) == (damaged, 0)
    assert [w for w in stats["warnings"] if "rank 1: DamagedError: 1 of" in w]


@pytest.mark.parametrize("fault", ["slow copy", "slow load"])
def test_slow_copy_on_one_rank_delays_only_its_samples(two_ranks: LiveServer, run: str, fault: str) -> None:
    """Slots being copied stay held, samples being loaded join no batch, and other requests are served."""
    server, lost = two_ranks.server, store(two_ranks)["lost"]
    if fault == "slow copy":
        with server.fault(fault):
            left = suspended(two_ranks, run, "host")
            assert store(two_ranks)["in_flight"] == on_tier(two_ranks, run, "host") > 0
            assert server.state()["pool"]["held"] > 0
            server.rollout(run=f"{run}-other", prompts=[prompt("other", 10, **PARAMS)], quota=None)
            assert store(two_ranks)["in_flight"] > 0
        until(lambda: not store(two_ranks)["in_flight"], "all copies are made")
        assert server.state()["pool"]["held"] == 0
        kept = on_tier(two_ranks, run, "host")
        stats = finish(two_ranks, run, left)
    else:
        left = suspended(two_ranks, run, "host")
        until(lambda: not store(two_ranks)["in_flight"], "all copies are made")
        kept = on_tier(two_ranks, run, "host")
        with server.fault(fault):
            reply = two_ranks.in_background(finish, two_ranks, run, left)
            until(lambda: store(two_ranks)["in_flight"], "pages are being loaded")
            server.post("/generate", {"input_ids": [9, 8, 7], "sampling_params": {"max_new_tokens": 4}})
            assert two_ranks.running() == 0
            assert store(two_ranks)["in_flight"] > 0
        stats = two_ranks.result_of(reply)
    assert (stats["resumed_kept"], stats["kv_lost"], store(two_ranks)["lost"] - lost) == (kept, 0, 0)


def test_attached_request_over_a_push(two_ranks: LiveServer) -> None:
    """Requests of SGLang's own routes are suspended and resumed alike on both ranks (`attached-request`)."""
    live = two_ranks
    v = live.version
    params = {**PARAMS, "sampling_seed": 41, "max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": IDS, "sampling_params": params, "return_logprob": True}
    headers = {"x-april-run": "agents"}
    with live.server.slowed():
        answers = [live.in_background(live.server.http.post, "/generate", json=body, headers=headers) for _ in range(3)]
        until(lambda: live.running() == 3, "the requests run")
        live.push(1)
    for reply in map(live.result_of, answers):
        answer = reply.json()
        assert answer["meta_info"]["completion_tokens"] == 40
        assert answer["meta_info"]["april"]["policy_version"] == v + 1
        assert {span["version"] for span in answer["meta_info"]["april"]["spans"]} == {v, v + 1}
        check_tokens(live, answer, IDS)
    first, second = digests(live)
    common = min(len(first), len(second))
    assert first[:common] == second[:common]


def test_trajectories_over_pushes(two_ranks: LiveServer, run: str) -> None:
    """Both ranks keep KV between turns, and end the round in the same step (`parked-kv`, `trajectory-quota`)."""
    live, v = two_ranks, two_ranks.version
    reply = open_round(live, run, quota=2)

    def agent(name: str) -> None:
        history = list(PROMPT)
        for _ in range(3):
            history += [*leg(live, run, name, history)["output_ids"], 1]

    with live.server.slowed(0.03):
        agents = [live.in_background(agent, f"t{i}") for i in range(2)]
        late = live.in_background(leg, live, run, "late", PROMPT, length=200)
        live.wait_decodes(8)
        live.push(1)
        for one in agents:
            live.result_of(one)
        done(live, run, "t0", "t1")
    ended = live.result_of(reply)
    assert [t["id"] for t in ended["trajectories"]] == ["t0", "t1"]
    assert all(len(t["legs"]) == 3 and len(t["branches"]) == 1 for t in ended["trajectories"])
    assert {known["legs"][-1]["spans"][-1]["version"] for known in ended["trajectories"]} == {v + 1}
    # The new token, and the last one of the leg before unless a step has computed its KV; more after a random retract.
    prefilled = [one["prefilled"] for known in ended["trajectories"] for one in known["legs"][1:]]
    assert min(prefilled) <= 2, prefilled
    assert not late.done()
    assert live.server.http.get("/april/check").json()["ok"]
    done(live, run, reject=["late"])
    assert live.result_of(late)["meta_info"]["finish_reason"]["type"] == "abort"
    first, second = digests(live)
    common = min(len(first), len(second))
    assert first[:common] == second[:common]
