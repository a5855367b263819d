"""No step makes the host wait for a GPU, apart from the reviewed calls (tests/support/sync_detector.py)."""

import pytest

from tests.support.server import Server
from tests.support.workload import prompt, stoppers


@pytest.fixture(params=["server", "overlap"])
def each_loop(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


def test_steps_with_suspends_resumes_and_requests_of_others(each_loop: Server, run: str) -> None:
    """All tiers, all ways to resume, penalties, filters, and rows of other clients in the batch."""
    body = {"run": run, "sampling_params": {"temperature": 0.8, "sampling_seed": 3, "top_p": 0.9}}
    # Penalties are refused in the overlap loop.
    penalised = prompt("penalised", 30, **({} if each_loop.state()["overlap"] else {"frequency_penalty": 0.5}))
    with each_loop.stalls_detected() as found:
        each_loop.rollout(prompts=[*stoppers([5, 8]), prompt("a", 40, n=4), penalised], quota=1, tier="host", **body)
        each_loop.rollout(prompts=[prompt("b", 30, n=2)], quota=1, tier="disk", **body)
        each_loop.push(each_loop.model, flush=False)
        each_loop.rollout(prompts=[prompt("c", 12)], quota=1, tier="none", **body)
        each_loop.post("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 8, "top_p": 0.5}})
        each_loop.drain(run)
    calls = set(found.read_text().splitlines())
    assert not {call for call in calls if call.startswith("found")}
    assert any("_fill_decode_tensors" in call for call in calls), "the detector has seen samples resume"
