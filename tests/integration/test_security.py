"""What docs/security.md specifies about keys, on a server with both."""

import httpx

from tests.integration.conftest import NORMAL, Pool
from tests.unit.test_security_page import ADMIN, KEYS, LEVELS, USER, allowed

SGLANG = {
    ("POST", "/update_weights_from_disk"): "admin",
    ("POST", "/update_weights_from_tensor"): "admin",
    ("POST", "/update_weights_from_distributed"): "admin",
    ("POST", "/pause_generation"): "admin",
    ("POST", "/continue_generation"): "admin",
    ("POST", "/flush_cache"): "admin",
    ("POST", "/abort_request"): "admin",
    ("POST", "/release_memory_occupation"): "admin",
    ("POST", "/generate"): "user",
    ("POST", "/v1/chat/completions"): "user",
    ("GET", "/server_info"): "user",
}
FLAGS = [*NORMAL, f"--api-key={USER}", f"--admin-api-key={ADMIN}", "--enable-metrics"]


def test_a_server_with_both_keys(pool: Pool) -> None:
    """Each route takes its key and no other; `/health` and `/metrics` need none; `/server_info` has both keys."""
    server = pool.get("keys", FLAGS, forked=True)

    def call(method: str, path: str, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        content = b"{" if method == "POST" else None  # refused by the route, if it is reached
        return server.http.request(method, path.replace("{round_id}", "none"), headers=headers, content=content)

    for (method, path), level in {**LEVELS, **SGLANG}.items():
        right = allowed(level, True, True)
        wrong = [key for key in KEYS if key not in right]
        assert [call(method, path, key).status_code for key in wrong] == [401] * len(wrong), path
        if path != "/flush_cache" and path != "/release_memory_occupation":  # these need no body
            assert [call(method, path, key).status_code for key in right] != [401], path
    for path in ("/health", "/metrics"):
        assert call("GET", path, "").status_code == 200
    metrics = call("GET", "/metrics", "").text
    assert "\nsglang:num_running_reqs{" in metrics, "SGLang's own, by --enable-metrics"
    assert "\nsglang_april:round_seconds_count{" in metrics
    assert "sglang_april:samples{model_name=" in metrics
    known = call("GET", "/server_info", USER).json()
    assert (known["api_key"], known["admin_api_key"]) == (USER, ADMIN)
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    user = {"authorization": f"Bearer {USER}"}
    refused = server.http.post("/generate", json={**body, "custom_labels": {"x": "y"}}, headers=user)
    assert refused.status_code == 400, "an unknown label would end the server"
    assert "custom_labels" in refused.text
    assert server.http.post("/generate", json=body, headers=user).status_code == 200
    server.stop()
