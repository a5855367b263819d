"""`kv: auto` on the live server: measured at start, decided per sample, reported in the reply and the state."""

from typing import Any

import pytest

from tests.support.live import LiveServer

SAMPLES = 2
PARAMS: dict[str, dict[str, Any]] = {"long": {"temperature": 0.8}, "short": {}}
DEAR_COPIES, CHEAP_COPIES = (1e-6, 1.0), (1.0, 1e-6)


def over_a_push(live: LiveServer, run: str, tier: str) -> tuple[list[Any], dict[str, Any]]:
    """Start two samples under one policy, finish them under the next; return all groups and the second round's stats.

    With the tier `auto` they stay on the device until the push, which flushes it.
    """
    prompts = [
        {"id": "long", "input_ids": [20, 21, 22], "n": SAMPLES, "sampling_params": {"max_new_tokens": 48}},
        {"id": "short", "input_ids": [30, 31], "sampling_params": {"max_new_tokens": 6}},
    ]
    for prompt in prompts:
        prompt["sampling_params"] |= {"ignore_eos": True, **PARAMS[prompt["id"]]}
    first = live.server.rollout(run=run, prompts=prompts, quota=1, kv="auto", tier=tier)
    live.push(1)
    second = live.server.rollout(run=run, prompts=[], quota=None, kv="auto")
    return first["finished"] + second["finished"], second["stats"]


@pytest.mark.parametrize("tier", ["host", "auto"])
@pytest.mark.parametrize(
    ("rates", "kv", "decided"),
    [
        (DEAR_COPIES, "recomputed", {"keep": {}, "recompute": {"cheaper": SAMPLES}}),
        (CHEAP_COPIES, "kept", {"keep": {"host": SAMPLES}, "recompute": {}}),
    ],
)
def test_auto_takes_and_reports_the_cheaper_option(
    live: LiveServer, run: str, tier: str, rates: tuple[float, float], kv: str, decided: dict[str, Any]
) -> None:
    """The measured rates decide; tokens match their spans in both cases."""
    measured = live.server.state()["kv_cost"]
    assert measured["token_s"] > 0
    assert {name: tier["out_gb_per_s"] > 0 for name, tier in measured["tiers"].items()} == {"host": True, "disk": True}
    v = live.version
    with live.server.rates(*rates):
        groups, stats = over_a_push(live, run, tier)
    assert stats["kv_decisions"] == decided
    assert stats["kv_cost"]["token_s"] == rates[0]
    assert stats["kv_fallback"] == 0
    (long,) = (g for g in groups if g["id"] == "long")
    spans = [[(s["version"], s["kv"]) for s in sample["spans"]] for sample in long["samples"]]
    assert spans == [[(v, "fresh"), (v + 1, kv)]] * SAMPLES
    live.check(groups, PARAMS)
