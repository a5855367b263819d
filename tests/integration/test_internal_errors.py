"""Exceptions of the plugin on a live server do not end it (`contained-faults`)."""

import pytest

from tests.integration.conftest import NORMAL, Pool
from tests.support.background import BackgroundRound
from tests.support.live import until
from tests.support.workload import prompt


@pytest.mark.parametrize("path", ["/april/push/begin", "/pause_generation"])
def test_failed_suspend_ends_rounds_keeps_weights_and_leaves_sglang_serving(pool: Pool, run: str, path: str) -> None:
    """If samples cannot be suspended, no call waits for them forever, and their weights do not change."""
    server = pool.get("unchecked", NORMAL, env={"SGLANG_APRIL_CHECK": "0"}, forked=True)
    asked = {"text": "1+1=", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    wanted = server.post("/generate", asked)["text"]
    with server.slowed(0.02):
        waiting = BackgroundRound(server, run=run, prompts=[prompt("long", 400)], quota=None)
        until(lambda: server.state()["samples"]["running"] == 1)
        server.remove_guard("suspend")
        server.http.post(path, json={"mode": "retract"} if path == "/pause_generation" else {})
        reason = waiting.reply(500)["error"]["reason"]
    assert "RuntimeError('nobody leaves')" in reason
    if path == "/pause_generation":
        server.post("/continue_generation", {"torch_empty_cache": False})
    assert server.rollout(status=503, run="next", prompts=[prompt("next", 4)])["error"]["reason"] == reason
    weights = {"model_path": str(server.model), "flush_cache": False}
    refused = server.post("/update_weights_from_disk", weights, status=400)
    assert reason in refused["message"]
    assert server.post("/generate", asked)["text"] == wanted
    assert server.alive
    server.stop()
