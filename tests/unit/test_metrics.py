"""What a round adds to the Prometheus figures."""

from prometheus_client import REGISTRY

from sglang_april.http.reply import Reply, delivery_stats
from sglang_april.metrics import Metrics


def test_a_round_is_counted() -> None:
    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang_april:{name}", {"model_name": "m", **labels})

    metrics = Metrics({"model_name": "m"})
    stats = {
        "delivered": {
            **delivery_stats([], 4),
            "samples": 3,
            "tokens_by_kv": {"fresh": 5, "kept": 2, "recomputed": 0},
        },
        "tokens_after_quota": 1,
        "reprefilled_tokens": 7,
        "kv_decisions": {"keep": {"host": 3}, "recompute": {}},
        "quota_to_built_s": 0.003,
    }
    carried = {"groups": 2, "samples": 4, "tokens": 60, "bytes": {"device": 100, "host": 0}}
    for _ in range(2):
        metrics.observe(Reply("r", "run", 4, "quota", [], carried, stats))
    assert value("rounds_total", end_reason="quota") == 2
    assert value("delivered_samples_total") == 6
    assert value("delivered_tokens_total", kv="kept") == 4
    assert value("tokens_after_quota_total") == 2
    assert value("reprefilled_tokens_total") == 14
    assert value("kv_decisions_total", decision="keep", why="host") == 6
    assert value("quota_to_reply_seconds_bucket", le="0.005") == 2
    assert value("carried", what="tokens") == 60
    assert value("carried_bytes", tier="device") == 100
    assert value("policy_version") == 4
