"""The online audit on a live server: it finds damaged KV and wrong spans, finds nothing else, and delays nothing."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import OVERLAP, Pool
from tests.support.live import LiveServer, live_server, until
from tests.support.workload import flush, prompt, stoppers, token_ids

LENGTH = 90
"""With its prompt more than a chunk of a prefill."""


@pytest.fixture
def audited(pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """Overlap loop; eight samples of each version are audited, and a finding refuses rounds. A version of its own."""
    server = pool.get("audited", [*OVERLAP, "--april-audit=8", "--april-audit-strict"], forked=True)
    server.post("/april/audit/ack")
    with live_server(server, lambda seed: models("qwen3", seed)) as live:
        live.push(0)
        yield live
        server.remove_guard(None)
        server.post("/april/audit/ack")


def audit(live: LiveServer) -> dict[str, Any]:
    """The audit's state once nothing waits."""

    def idle() -> Any:
        state = live.server.state()["audit"]
        return state if not state["waiting"] else None

    return dict(until(idle, "the audit is done"))


def suspended_once(live: LiveServer, run: str, **params: Any) -> None:
    """A sample is suspended after some tokens."""
    given = prompt("long", LENGTH, ids=token_ids(20, 7), n=3)
    given["sampling_params"] |= params
    live.server.rollout(run=run, prompts=[*stoppers([40]), given], quota=1, tier="device")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_an_undisturbed_server_has_no_finding(audited: LiveServer, run: str, temperature: float) -> None:
    """Over pushes, with samples that stop and resume on kept KV, by recompute, and within one version."""
    before = audit(audited)
    for i, kv in enumerate(("recompute", "keep", "recompute")):
        suspended_once(audited, f"{run}-{i}", temperature=temperature)
        audited.server.rollout(run=f"{run}-{i}", prompts=stoppers([4]), quota=1)
        audit(audited)
        audited.push(i % 2)
        audited.server.drain(f"{run}-{i}", kv=kv)
        audit(audited)
    state = audit(audited)
    assert state["found"] == before["found"], state["findings"]
    assert state["audited"] >= before["audited"] + 8
    assert state["skipped"]["kept KV"] > before["skipped"].get("kept KV", 0)
    if not before["found"]:
        assert state["largest_difference"] < state["tolerance"] / 10


def finding(live: LiveServer, run: str) -> dict[str, Any]:
    """The newest finding: it is of the run, and new rounds are refused until it is acknowledged."""
    state = audit(live)
    assert state["refusal"], state
    found = state["findings"][-1]
    assert (found["run"], found["id"], found["version"]) == (run, "long", live.version)
    refused = live.server.rollout(run="other", prompts=[prompt("a", 2)], quota=1, status=503)
    assert refused["error"]["field"] == "audit"
    assert "'long'" in refused["error"]["reason"]
    assert "POST /april/audit/ack" in refused["error"]["reason"]
    assert "the audit found sample" in live.server.log.read_text(errors="replace")
    assert 'outcome="finding"' in live.server.http.get("/metrics").text
    live.server.post("/april/audit/ack")
    live.server.rollout(run="other", prompts=[prompt("a", 2)], quota=1)
    return dict(found)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_damaged_page_of_a_partial_is_found(
    audited: LiveServer, run: str, temperature: float, record_property: Callable[[str, object], None]
) -> None:
    suspended_once(audited, run, temperature=temperature)
    audited.server.remove_guard("sound pages")
    audited.server.drain(run)
    found = finding(audited, run)
    assert found["token"] >= 20
    assert found["difference"] > 0.1  # with half-precision weights it would be a finding too
    record_property("guard", "sound pages")


@pytest.mark.parametrize("name", ["kept span", "span version"])
def test_a_wrong_span_is_found(
    audited: LiveServer, run: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    """KV of an older version that is labelled fresh; tokens of an older version that are labelled with the current."""
    suspended_once(audited, run)
    audited.push(1)
    audited.server.remove_guard(name)
    audited.server.drain(run, kv="keep")
    finding(audited, run)
    record_property("guard", name)


@pytest.mark.parametrize("name", ["sound pages", "span version"])
def test_a_damaged_page_and_a_wrong_span_of_an_attached_request_are_found(
    audited: LiveServer, run: str, name: str
) -> None:
    """It is suspended by a pause within a version, or by a push."""
    server = audited.server
    params = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True, "sampling_seed": 5}
    params["custom_params"] = {"x-april-run": run}
    body = {"rid": "long", "input_ids": token_ids(20, 7), "sampling_params": params, "return_logprob": True}
    with server.slowed():
        answer = audited.in_background(server.post, "/generate", body)
        until(lambda: audited.running() == 1, "it runs")
        audited.wait_decodes(30)
        server.remove_guard(name)
        if name == "sound pages":
            server.post("/pause_generation", {"mode": "retract"})
            server.post("/continue_generation", {})
        else:
            audited.push(1)
    assert len(audited.result_of(answer)["output_ids"]) == LENGTH
    finding(audited, run)


def test_weight_calls_under_a_pause_do_not_wait_for_an_audit(audited: LiveServer, run: str) -> None:
    """SGLang holds every request back while it is paused: an audit that begins then would wait for the end of the
    pause, and the weight call for the audit."""
    server = audited.server
    server.rollout(run=run, prompts=[prompt("rest", 40, n=8)], quota=None)
    server.post("/pause_generation", {"mode": "in_place"})
    try:
        time.sleep(1)  # several polls of the audit
        assert server.state()["audit"]["waiting"]
        assert audited.load(0)["success"]
    finally:
        server.post("/continue_generation", {"torch_empty_cache": False})
    audit(audited)


def test_pushes_flushes_and_pauses_do_not_wait_for_an_audit(audited: LiveServer, run: str) -> None:
    """An audit that is in flight is aborted; its sample counts as discarded, and the call succeeds."""
    server = audited.server
    rest = [prompt("rest", 40, n=4)]
    before = server.state()["audit"]
    with server.slowed(0.02):
        server.rollout(run=run, prompts=rest, quota=None)
        flush(server)
        server.rollout(run=run, prompts=rest, quota=None)
        server.push(server.model)
        server.rollout(run=run, prompts=rest, quota=None)
        server.post("/pause_generation", {"mode": "in_place"})
        server.post("/continue_generation", {"torch_empty_cache": False})
        server.rollout(run=run, prompts=rest, quota=None)
        server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        server.rollout(run=run, prompts=rest, quota=None)
        assert audited.load(0)["success"]
    after = audit(audited)
    assert after["discarded"] > before["discarded"]
    assert after["found"] == before["found"]
