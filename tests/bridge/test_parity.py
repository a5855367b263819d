"""The Megatron model against Hugging Face's: logits, logprobs, gradients and weights of four families, TP 1 and 2."""

from pathlib import Path

import numpy as np
import pytest
import torch

from examples.tiny_model import FAMILIES, config, make
from tests.bridge.parity_ranks import Results, compute, compute_on_ranks
from tests.bridge.reference import hf_logits, hf_logprobs, hf_model, sequences
from trainer_bridge.megatron import mapping
from trainer_bridge.megatron.mapping import Kind
from trainer_bridge.megatron.shapes import ModelShape

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""In float32; absolute for logits, whose spread is about 1; relative to the largest element for gradients."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parity")
    return {family: make(root / family, family=family) for family in FAMILIES}


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def results(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    if request.param == 1:
        return compute(folders, 0, 1, None)
    return compute_on_ranks(folders, request.param, tmp_path_factory.mktemp("rendezvous") / "ranks")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_logprobs_and_gradients_equal_those_of_hugging_face(
    family: str, results: Results, folders: dict[str, Path]
) -> None:
    model, given, got = hf_model(folders[family]), sequences(), results[family]
    logprobs = hf_logprobs(model, given)
    (-logprobs.mean()).backward()
    np.testing.assert_allclose(got["logprobs"], logprobs.detach().numpy(), atol=TOLERANCE, rtol=0)
    with torch.no_grad():
        np.testing.assert_allclose(got["logits"], hf_logits(model, given).numpy(), atol=TOLERANCE, rtol=0)
    expected = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert set(got["gradients"]) == set(expected)
    for name, gradient in expected.items():
        assert np.abs(got["gradients"][name] - gradient).max() < TOLERANCE * np.abs(gradient).max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_weights_equal_the_loaded_ones_bit_for_bit(
    family: str, results: Results, folders: dict[str, Path]
) -> None:
    expected = dict(hf_model(folders[family]).named_parameters())
    assert set(results[family]["weights"]) == set(expected)
    for name, parameter in expected.items():
        assert np.array_equal(results[family]["weights"][name], parameter.detach().numpy()), name


# --- the mapping alone, also for shapes that the tiny models do not have


SHAPES = {family: ModelShape.of({**config(family), "tie_word_embeddings": False}) for family in FAMILIES}


@pytest.mark.parametrize("fused_norms", [False, True], ids=["local", "transformer engine"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_survives_the_round_trip(family: str, fused_norms: bool) -> None:
    shape = SHAPES[family]
    rng = torch.Generator().manual_seed(0)
    sizes = {
        "q": shape.heads * shape.head_dim,
        "k": shape.kv_heads * shape.head_dim,
        "v": shape.kv_heads * shape.head_dim,
    }
    for row in mapping.parameter_mappings(shape, fused_norms=fused_norms):
        hf = {}
        for name in row.hf:
            rows = next((size for x, size in sizes.items() if f".{x}_proj" in name), 2 * shape.mlp)
            hf[name] = torch.randn((rows,) if "bias" in name or "norm" in name else (rows, 8), generator=rng)
        full = mapping.to_megatron(row, hf, shape)
        shards = [mapping.shard(row, full, rank, 2) for rank in range(2)]
        back = mapping.to_hf(row, mapping.unshard(row, shards), shape)
        assert set(back) == set(hf)
        assert all(torch.equal(back[name], hf[name]) for name in hf), row.megatron
        assert row.kind is Kind.REPLICATED or shards[0].numel() * 2 == full.numel(), row.megatron


def test_only_norms_differ_between_the_two_sets_of_names() -> None:
    local, fused = (
        {r.megatron: r for r in mapping.parameter_mappings(SHAPES["qwen3"], fused_norms=f)} for f in (False, True)
    )
    assert {local[name].hf for name in set(local) - set(fused)} == {fused[n].hf for n in set(fused) - set(local)}
    assert sorted(n for n in set(fused) - set(local) if ".0." in n) == [
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
    ]


def test_query_heads_are_fused_with_their_key_and_value_head() -> None:
    shape = SHAPES["qwen2"]  # 4 query heads, 2 key/value heads of 32
    row = next(
        r
        for r in mapping.parameter_mappings(shape, fused_norms=False)
        if r.megatron.endswith("0.self_attention.linear_qkv.bias")
    )
    numbered = {name: torch.arange(128.0 if ".q_" in name else 64.0) + 1000 * i for i, name in enumerate(row.hf)}
    fused = mapping.to_megatron(row, numbered, shape)
    second = mapping.shard(row, fused, 1, 2)
    assert second.tolist() == [*range(64, 128), *range(1032, 1064), *range(2032, 2064)]
