"""SGLang's timeouts of requests, which do not count the time for which a request is suspended."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_april.adapter import versions
from sglang_april.client import attach
from tests.integration.conftest import NORMAL, OVERLAP, Pool
from tests.integration.test_interruptions import pause, unpause
from tests.integration.test_trajectories import done, open_round, pending
from tests.support.live import LiveServer, live_server, until

TIMEOUT_S = 8.0
LENGTH = 30
PARAMS: dict[str, Any] = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}


@pytest.fixture(params=[NORMAL, OVERLAP], ids=["normal", "overlap"])
def limited(request: pytest.FixtureRequest, pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """A server that aborts requests which have waited, or run, for `TIMEOUT_S`."""
    env = {f"SGLANG_REQ_{kind}_TIMEOUT": str(TIMEOUT_S) for kind in ("WAITING", "RUNNING")}
    server = pool.get(f"limited {request.param[0]}", request.param, env=env, forked=True)
    with live_server(server, lambda seed: models("qwen3", seed)) as live:
        yield live
    live.server.stop()


def ask(live: LiveServer, run: str, length: int = LENGTH, trajectory: str | None = None) -> Any:
    body = {"input_ids": [9, 8, 7], "sampling_params": {**PARAMS, "max_new_tokens": length}}
    return live.server.http.post("/generate", json=body, headers=attach(run, trajectory))


def a_leg_between_rounds(live: LiveServer, run: str) -> Any:
    """It is suspended by the quota of one round, and continues in the next one."""
    reply = open_round(live, run, quota=1)
    assert ask(live, run, 2, "another").status_code == 200
    answer = live.in_background(ask, live, run, trajectory="t")
    until(lambda: pending(live, run) == 1, "it arrives")
    live.wait_decodes()
    done(live, run, "another")
    live.result_of(reply)
    time.sleep(TIMEOUT_S + 1)
    assert not answer.done()
    open_round(live, run, quota=None)
    return answer


def test_no_timeout_counts_pauses_and_pushes(limited: LiveServer, run: str) -> None:
    """One request is suspended while it runs, another one as it arrives. One that runs as long is aborted."""
    live = limited
    with live.server.slowed():
        running = live.in_background(ask, live, run)
        until(lambda: live.running() == 1, "it runs")
        live.wait_decodes()
        pause(live, "in_place")
        time.sleep(TIMEOUT_S + 1)
        unpause(live)
        live.wait_decodes()
        live.server.post("/april/push/begin")
        late = live.in_background(ask, live, run)
        until(lambda: pending(live, run) == 2, "another one arrives")
        time.sleep(TIMEOUT_S + 1)
        assert not running.done()
        assert not late.done()
        live.server.post("/april/push/end")
        leg = a_leg_between_rounds(live, f"{run}-legs")
    for answer in map(live.result_of, (running, late, leg)):
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["output_ids"]) == LENGTH
        assert answer.json()["meta_info"]["finish_reason"] == {"type": "length", "length": LENGTH}
    with live.server.slowed(0.5):
        aborted = ask(live, run, length=200)
    if versions.installed()["sglang"] == "0.5.23":  # answers with the tokens so far and no reason
        assert aborted.json()["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert "timeout reached" in aborted.text
