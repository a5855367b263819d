"""Two policies on one server; tokens, logprobs and spans against replays by Hugging Face models."""

from typing import Any

import pytest

from tests.support.live import LiveServer
from tests.support.oracle import LOGPROB_LIMIT, Oracle, logprobs_of, processed

Fields = dict[str, Any]

PARAMS: dict[str, Fields] = {
    "plain": {},
    "cool": {"temperature": 0.8},
    "greedy": {"temperature": 0},
    "bias": {"temperature": 0.8, "logit_bias": {"7": 2.0, "300": -3.0}},
    "top_p": {"temperature": 0.8, "top_p": 0.8},
    "top_k": {"top_k": 7, "min_p": 0.02},
}
# SGLang applies additive and scaling penalties in the order of a set of classes, so the two are not combined here.
PENALTIES: dict[str, Fields] = {
    "additive": {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.3},
}
LENGTH = 48
SHORT: Fields = {"max_new_tokens": 6}
KEPT, RECOMPUTED = "kept", "recomputed"


def prompts_of(params: dict[str, Fields], n: int = 2) -> list[Fields]:
    """One prompt per set of parameters; all samples end by length."""
    common = {"ignore_eos": True, "max_new_tokens": LENGTH}
    return [
        {"id": name, "input_ids": [20 + i, 21, 22 + i, 23, 24], "n": n, "sampling_params": {**common, **given}}
        for i, (name, given) in enumerate(params.items())
    ]


def three_versions(live: LiveServer, run: str, params: dict[str, Fields], **round_fields: Any) -> list[Fields]:
    """Three rounds with a push before the second and the third; each short prompt ends a round by its quota."""
    groups: list[Fields] = []
    for i, seed in enumerate((0, 1, 0)):
        if i:
            live.push(seed)
        short = prompts_of({f"short {i}": SHORT}, n=1)
        first = prompts_of(params) if i == 0 else []
        groups += live.server.rollout(run=run, prompts=[*first, *short], quota=1, **round_fields)["finished"]
    groups += live.server.drain(run, **{k: v for k, v in round_fields.items() if k in ("kv", "proximal")})
    assert sorted(g["id"] for g in groups) == sorted([*params, "short 0", "short 1", "short 2"])
    return groups


def params_with_short(params: dict[str, Fields]) -> dict[str, Fields]:
    return {**params, **{f"short {i}": SHORT for i in range(3)}}


def spans_of(groups: list[Fields], name: str) -> list[list[tuple[int, str]]]:
    """Version and provenance of the spans of every sample of a group."""
    return [[(s["version"], s["kv"]) for s in x["spans"]] for g in groups if g["id"] == name for x in g["samples"]]


@pytest.mark.parametrize(
    ("tier", "kv"), [("device", "keep"), ("host", "keep"), ("device", "recompute"), ("none", "keep")]
)
def test_each_token_matches_the_version_and_kv_of_its_span(live: LiveServer, run: str, tier: str, kv: str) -> None:
    """Over three versions: `fresh` and `recomputed` equal a plain forward, `kept` a replay on the old cache."""
    params = PARAMS if "overlap" in live.server.name else {**PARAMS, **PENALTIES}
    v = live.version
    groups = three_versions(live, run, params, tier=tier, kv=kv)
    later = KEPT if (tier, kv) != ("none", "keep") and kv == "keep" else RECOMPUTED
    for name in params:
        assert spans_of(groups, name) == [[(v, "fresh"), (v + 1, later), (v + 2, later)]] * 2
    results = live.check(groups, params_with_short(params))
    drift, kept = max(x.kv_drift for x in results), sum(x.kept for x in results)
    print(f"\nKV drift ({live.server.name}, {tier}, {kv}): {drift:.4f} over {kept} kept tokens")
    assert (kept > 0) == (later == KEPT)


def test_reference_check_can_fail(normal: LiveServer, run: str) -> None:
    """The check detects a shifted span, a wrong version, a wrong provenance and a wrong seed."""
    v = normal.version
    groups = three_versions(normal, run, {"cool": PARAMS["cool"]}, kv="keep")
    group = next(g for g in groups if g["id"] == "cool")
    prompt, sample = group["prompt_ids"], group["samples"][0]
    oracle = Oracle(normal.policies)

    def wrong(**changed: Any) -> bool:
        result = oracle.compare(prompt, {**sample, **changed}, PARAMS["cool"])
        return result.logprob_error > LOGPROB_LIMIT or bool(result.mismatched_tokens)

    first, second, third = sample["spans"]
    assert not wrong()
    for shift in (-1, 1):
        end = first["end"] + shift
        assert wrong(spans=[{**first, "end": end}, {**second, "start": end}, third])
    assert wrong(spans=[first, {**second, "end": third["end"]}])
    assert wrong(spans=[first, {**second, "kv": RECOMPUTED}, third])
    assert wrong(spans=[first, second, {**third, "kv": RECOMPUTED}])
    assert wrong(seed=sample["seed"] + 1)
    swapped = Oracle({**normal.policies, v: normal.model(1)})
    assert swapped.compare(prompt, sample, PARAMS["cool"]).logprob_error > LOGPROB_LIMIT


def test_proximal_logprobs_match_the_recomputing_policy(live: LiveServer, run: str) -> None:
    """Old tokens get the recomputing version's logprobs, its own tokens repeat theirs, penalised samples none."""
    penalised = {} if "overlap" in live.server.name else PENALTIES
    params = {**PARAMS, **penalised, "least": {"min_new_tokens": 3}}
    groups = three_versions(live, run, params, kv="recompute", proximal=True)
    oracle = Oracle(live.policies)
    for group in (g for g in groups if not g["id"].startswith("short")):
        for sample in group["samples"]:
            if group["id"] in (*PENALTIES, "least"):
                assert sample.get("proximal_logprobs") is None
                continue
            values, last = sample["proximal_logprobs"], sample["spans"][-1]
            assert sample["proximal_version"] == last["version"] == live.version
            assert len(values) == len(sample["output_ids"])
            assert values[last["start"] :] == sample["logprobs"][last["start"] :]
            expected = plain_logprobs(oracle, group, sample, params[group["id"]])
            assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) < LOGPROB_LIMIT
    assert sum(spans_of(groups, "plain")[0][i][1] == RECOMPUTED for i in range(3)) == 2


def plain_logprobs(oracle: Oracle, group: Fields, sample: Fields, params: Fields) -> list[float]:
    """Logprobs of the whole output in one plain forward under `proximal_version`."""
    import torch

    output = list(sample["output_ids"])
    rows = processed(oracle.logits(list(group["prompt_ids"]), output, sample["proximal_version"]), output, params)
    return [float(x) for x in logprobs_of(rows, torch.tensor(output))]


def test_tokens_after_the_last_recompute_have_no_proximal_logprob(normal: LiveServer, run: str) -> None:
    """Recomputed under version 1, continued on kept KV under version 2: null for the tokens of version 2."""
    params = {"cool": PARAMS["cool"]}
    server, v = normal.server, normal.version
    server.rollout(run=run, prompts=[*prompts_of(params), *prompts_of({"a": SHORT}, n=1)], quota=1)
    normal.push(1)
    server.rollout(run=run, prompts=prompts_of({"b": SHORT}, n=1), quota=1, kv="recompute", proximal=True)
    normal.push(0)
    (group,) = server.drain(run, kv="keep", proximal=True)
    oracle = Oracle(normal.policies)
    for sample in group["samples"]:
        spans = [(s["version"], s["kv"]) for s in sample["spans"]]
        assert spans == [(v, "fresh"), (v + 1, RECOMPUTED), (v + 2, KEPT)]
        assert sample["proximal_version"] == v + 1
        values, first, last = sample["proximal_logprobs"], sample["spans"][1]["start"], sample["spans"][2]["start"]
        assert values[last:] == [None] * (LENGTH - last)
        assert values[first:last] == sample["logprobs"][first:last]
        expected = plain_logprobs(oracle, group, sample, params["cool"])[:first]
        assert max(abs(a - b) for a, b in zip(values[:first], expected, strict=True)) < LOGPROB_LIMIT
    normal.check([group], params)


def test_truncated_sampling_is_reported_as_a_warning(normal: LiveServer, run: str) -> None:
    """The reply warns with top_p, and does not without it."""
    for name, warned in (("top_p", True), ("cool", False)):
        reply = normal.server.rollout(run=run, prompts=prompts_of({name: PARAMS[name]}, n=1), quota=1)
        assert bool(reply["stats"]["warnings"]) == warned


def test_prompt_cached_before_a_push_is_not_reused_after_it(live: LiveServer, run: str) -> None:
    """Positive control with `flush_cache: false`: cached tokens before the push, none after it."""
    server, prompt = live.server, list(range(30, 62))
    actual = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}

    def cached_tokens() -> int:
        answer = server.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}})
        return int(answer["meta_info"]["cached_tokens"])

    def prefilled_by_round(name: str) -> int:
        before = len(server.forwards())
        server.rollout(run=run, prompts=[{"id": name, **actual}], quota=1)
        return sum(f["tokens"] for f in server.forwards()[before:] if not f["decode"])

    server.post("/flush_cache")
    assert cached_tokens() == 0
    assert cached_tokens() > 0
    assert prefilled_by_round("a") < len(prompt)
    for seed in (1, 0):
        live.push(seed, flush=False)
        assert prefilled_by_round(f"b{seed}") == len(prompt), (
            "the prompt is prefilled again, not matched in KV of an older policy"
        )
        assert prefilled_by_round(f"c{seed}") < len(prompt)
        assert cached_tokens() > 0
        live.push(seed, flush=False)
        assert cached_tokens() == 0, "a prompt of /generate used KV of an older policy"


def test_prefixes_of_older_policies_are_evicted(live: LiveServer, run: str) -> None:
    """They can no longer be hit, so they do not occupy the pool."""
    server, prompt = live.server, list(range(30, 62))
    server.rollout(run=run, prompts=[*prompts_of({"plain": {}}, n=1), *prompts_of({"a": SHORT}, n=1)], quota=1)
    server.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}})
    assert server.state()["pool"]["evictable"] > 0
    live.push(1, flush=False)
    pool = server.state()["pool"]
    assert pool["evictable"] == 0
    assert pool["protected"] > 0, "a partial uses the KV of its prompt"
    assert len(server.drain(run, kv="keep")) == 1


def test_kept_kv_never_enters_the_tree(live: LiveServer, run: str) -> None:
    """KV that a sample wrote on kept KV is never a prefix, not even under its own version."""
    server = live.server
    prompts = [*prompts_of({"plain": {}}, n=1), *prompts_of({"a": SHORT}, n=1)]
    server.rollout(run=run, prompts=prompts, quota=1)
    live.push(1, flush=False)
    (group,) = server.drain(run, kv="keep")
    assert [s["kv"] for s in group["samples"][0]["spans"]] == ["fresh", KEPT]
    ids = [*group["prompt_ids"], *group["samples"][0]["output_ids"]]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", body)["meta_info"]["cached_tokens"] == 0
    assert server.post("/generate", body)["meta_info"]["cached_tokens"] > 0


def test_recompute_in_a_round_without_proximal_discards_earlier_values(normal: LiveServer, run: str) -> None:
    """Values of an older policy never appear under a version that did not compute them."""
    params = {"cool": PARAMS["cool"]}
    server, v = normal.server, normal.version
    server.rollout(run=run, prompts=[*prompts_of(params), *prompts_of({"a": SHORT}, n=1)], quota=1)
    normal.push(1)
    server.rollout(run=run, prompts=prompts_of({"b": SHORT}, n=1), quota=1, kv="recompute", proximal=True)
    normal.push(0)
    server.rollout(run=run, prompts=prompts_of({"c": SHORT}, n=1), quota=1, kv="recompute")
    normal.push(1)
    (group,) = server.drain(run, kv="keep", proximal=True)
    for sample in group["samples"]:
        assert [s["kv"] for s in sample["spans"]] == ["fresh", RECOMPUTED, RECOMPUTED, KEPT]
        assert [s["version"] for s in sample["spans"]] == [v, v + 1, v + 2, v + 3]
        assert sample.get("proximal_logprobs") is None
    normal.check([group], params)
