"""Sampling features across suspends: each sample equals one that was never stopped."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.compare import Key, assert_near, assert_same, by_key, stock_noise
from tests.support.server import Server
from tests.support.workload import flush, prompt, stoppers

Fields = dict[str, Any]

STOPS = [6, 12, 18, 24, 30]
"""Output tokens at which the rounds stop."""
SAMPLED: Fields = {"temperature": 1.0, "sampling_seed": 5}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{30}$"}, "even": {"type": "boolean"}},
    "required": ["name", "even"],
    "additionalProperties": False,
}
REGEX = "([a-z]{4} ){8}end"
LENGTH = 60
LETTERS = range(70, 96)
"""Token ids of a to z."""
FEATURES: dict[str, Fields] = {
    "json": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": REGEX},
    "stop regex": {"stop_regex": "[0-9][a-z0-9]"},
    "least": {"min_new_tokens": 40, "stop_token_ids": list(range(6, 200))},
    "bias": {"logit_bias": {"70": 4.0, "71": 4.0, "300": -100.0}},
}
PENALTIES: dict[str, Fields] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.8},
}
TIERS = ["device", "host", "none"]


def test_a_sample_that_sglang_refuses_has_no_tokens(each_loop: Server, run: str) -> None:
    """SGLang draws one for a sample whose grammar does not compile, of another prompt."""
    prompts = [prompt("wrong", 8, ids=[9, 8, 7], json_schema="{"), prompt("right", 8, ids=[9, 8, 7])]
    reply = each_loop.rollout(run=run, prompts=prompts, quota=None)
    ends = {
        g["id"]: (x["finish_reason"]["type"], len(x["output_ids"])) for g in reply["finished"] for x in g["samples"]
    }
    assert ends == {"wrong": ("abort", 0), "right": ("length", 8)}
    assert all(len(x["logprobs"]) == len(x["output_ids"]) for g in reply["finished"] for x in g["samples"])


def workload(features: dict[str, Fields]) -> list[Fields]:
    """Two samples per feature, with the likeliest tokens reported; `stop-…` groups end the rounds."""
    ends = {"ignore_eos": False}
    return [
        *stoppers(STOPS),
        *(
            prompt(name, LENGTH, n=2, top_logprobs_num=3, **{**SAMPLED, **ends, **params})
            for name, params in features.items()
        ),
    ]


def compiled(server: Server, run: str, features: dict[str, Fields]) -> None:
    """Empty the tree and compile every grammar, so that equal requests give equal batches."""
    flush(server)
    prompts = [prompt(f"warm-{name}", 50, **params) for name, params in features.items()]
    server.rollout(run=f"{run}-warm", prompts=prompts, quota=None)


_unbroken: dict[tuple[Server, str], dict[Key, Fields]] = {}


def unbroken(server: Server, run: str, features: dict[str, Fields]) -> dict[Key, Fields]:
    """Samples that were never stopped, made once per server."""
    key = server, json.dumps(features)
    if key not in _unbroken:
        compiled(server, f"{run}-unbroken", features)
        reply = server.rollout(run=f"{run}-unbroken", prompts=workload(features), quota=None)
        _unbroken[key] = by_key(reply["finished"])
    return _unbroken[key]


def in_rounds(server: Server, run: str, features: dict[str, Fields], tier: str) -> dict[Key, Fields]:
    """Run the workload over six rounds; samples of every feature are suspended with tokens."""
    compiled(server, run, features)
    groups, suspended = [], set()
    for i, _ in enumerate(STOPS):
        reply = server.rollout(run=run, prompts=[] if i else workload(features), quota=1, tier=tier)
        groups += reply["finished"]
        suspended |= {p["id"] for p in server.partials(run)}
    assert suspended >= features.keys()
    return by_key([*groups, *server.drain(run)])


def assert_samples_match(server: Server, tier: str, actual: dict[Key, Fields], wanted: dict[Key, Fields]) -> None:
    """Compare bit for bit on kept KV, and within the stock server's noise after a recompute."""
    if tier == "none":
        assert_near(actual, wanted, stock_noise(server), seeded=True)
    else:
        assert_same(actual, wanted)


def of(samples: dict[Key, Fields], name: str) -> list[Fields]:
    return [sample for key, sample in samples.items() if key[0] == name]


@pytest.fixture(params=["server", "overlap"])
def each_loop(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.mark.parametrize("tier", TIERS)
def test_grammars_stops_bias_and_top_logprobs(each_loop: Server, run: str, tier: str) -> None:
    """Grammars keep their state, `min_new_tokens` counts the whole sample, and top logprobs are complete."""
    wanted = unbroken(each_loop, run, FEATURES)
    samples = in_rounds(each_loop, run, FEATURES, tier)
    assert_samples_match(each_loop, tier, samples, wanted)
    for sample in of(samples, "json"):
        if sample["finish_reason"]["type"] == "stop":
            assert json.loads(sample["text"]).keys() == {"name", "even"}
    for sample in of(samples, "regex"):
        whole = sample["finish_reason"]["type"] == "stop"
        assert re.fullmatch(REGEX if whole else "([a-z]{0,4} ?)*(end)?", sample["text"])
    assert all(len(s["output_ids"]) >= 40 for s in of(samples, "least"))
    assert all(300 not in s["output_ids"] for s in of(samples, "bias"))
    assert all(len(row) == 3 for s in of(samples, "bias") for row in s["top_logprobs"])
    assert any(s["finish_reason"]["type"] == "stop" for name in FEATURES for s in of(samples, name))


@pytest.mark.parametrize("tier", TIERS)
def test_stop_string_split_across_two_rounds(each_loop: Server, run: str, tier: str) -> None:
    """The stop string spans two tokens, drawn in different rounds; the sample ends there."""
    free: dict[str, Fields] = {f"free-{i}": {"logit_bias": {str(t): 40.0 for t in LETTERS}} for i in range(4)}
    texts = {name: sample["text"] for (name, _, index), sample in unbroken(each_loop, run, free).items() if index == 0}
    flight = int(each_loop.state()["overlap"])
    cuts = {name: cut for name in free if (cut := spanning(texts[name], flight))}
    assert cuts, "no text has a string that is first seen where a round stops"
    stopping = {name: {**free[name], "stop": [text], "no_stop_trim": True} for name, text in cuts.items()}
    wanted = unbroken(each_loop, f"{run}-stops", stopping)
    samples = in_rounds(each_loop, run, stopping, tier)
    assert_samples_match(each_loop, tier, samples, wanted)
    for name, text in cuts.items():
        first = samples[name, 0, 0]
        assert first["finish_reason"] == {"type": "stop", "matched": text}
        assert first["text"].endswith(text)


def spanning(text: str, flight: int) -> str | None:
    """Return two letters on both sides of the last stop whose pair is new in the text; one letter is one token."""
    for stop in reversed(STOPS[1:]):
        last = stop - 1 + flight
        piece = text[last : last + 2]
        if len(piece) == 2 and text.find(piece) == last:
            return piece
    return None


@pytest.mark.parametrize("tier", TIERS)
def test_penalties_count_tokens_of_earlier_rounds(server: Server, run: str, tier: str) -> None:
    """Penalties count tokens drawn in earlier rounds."""
    assert_samples_match(server, tier, in_rounds(server, run, PENALTIES, tier), unbroken(server, run, PENALTIES))


@pytest.mark.parametrize("tier", ["device", "none"])
def test_penalty_check_fails_without_replay(
    server: Server, run: str, tier: str, record_property: Callable[[str, object], None]
) -> None:
    """The same check fails when a resumed batch starts with empty counters, as in stock SGLang."""
    wanted = unbroken(server, run, PENALTIES)
    server.remove_guard("penalty replay")
    samples = in_rounds(server, run, PENALTIES, tier)
    server.remove_guard(None)
    with pytest.raises(AssertionError):
        assert_samples_match(server, tier, samples, wanted)
    record_property("guard", "penalty replay")


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_refused_in_the_overlap_loop(overlap: Server, run: str, name: str) -> None:
    """In the overlap loop penalties lag by one token, so the request gets a 400."""
    refused = overlap.rollout(run=run, prompts=[prompt("p", 4, **PENALTIES[name])], quota=1, status=400)["error"]
    assert refused["field"].endswith(*PENALTIES[name])
    assert "--disable-overlap-schedule" in refused["reason"]
    assert overlap.rollout(run=run, prompts=[prompt("p", 4)], quota=1)["end_reason"] == "quota"
