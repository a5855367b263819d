"""bench.random_checkpoint: a folder that Hugging Face loads, of the size that it reports."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.random_checkpoint import SHAPES, CheckpointShape, make
from examples.tiny_model import weight_shapes

SMALL = CheckpointShape(hidden=64, mlp=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=700, context=128)


@pytest.mark.parametrize(("shape", "billions"), [("qwen3-4b", 4.02), ("qwen3-0.6b", 0.60)])
def test_a_shape_has_as_many_weights_as_its_model(shape: str, billions: float) -> None:
    sizes = [torch.Size(size).numel() for file in weight_shapes(SHAPES[shape].config()) for size in file.values()]
    assert round(sum(sizes) / 1e9, 2) == billions


def test_hugging_face_loads_it(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path / "a", SMALL, seed=0), dtype=torch.bfloat16)
    logits = model(torch.arange(8, 40)[None]).logits
    assert logits.shape == (1, 32, 700)
    assert 0.3 < logits.float().std() < 3
    assert torch.equal(model.model.embed_tokens.weight, model.lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.decode([699]) == "<699>"
    assert tokenizer.decode(tokenizer.encode("numbers 0 1 2")).endswith("numbers 0 1 2")


def test_seeds_are_policies(tmp_path: Path) -> None:
    first, second = (make(tmp_path / str(seed), SMALL, seed) for seed in (0, 1))
    name = "model-00002-of-00003.safetensors"
    assert (first / name).stat().st_size == (second / name).stat().st_size
    assert (first / name).read_bytes() != (second / name).read_bytes()
