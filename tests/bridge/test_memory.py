"""Estimates of trainer memory: against Megatron's own model on the meta device, a counted step, and each recipe."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trainer_bridge.args import load
from trainer_bridge.megatron.shapes import ModelShape
from trainer_bridge.memory import MemoryEstimate, estimate, parameters

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
COMMON = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1e6}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, **COMMON}
QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, **COMMON}
GLM4 = {"model_type": "glm4", "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, **COMMON}


def model(family: dict[str, Any], layers: int, hidden: int, mlp: int, heads: int, **other: Any) -> ModelShape:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads}
    return ModelShape.of({**family, **sizes, **other})


MODELS = {
    "Qwen3-4B": model(QWEN3, 36, 2560, 9728, 32),
    "DeepSeek-R1-Distill-Qwen-1.5B": model(QWEN2, 28, 1536, 8960, 12),
    "GLM-4-9B-0414": model(GLM4, 40, 4096, 13696, 32, vocab_size=151552),
}
"""As in `config.json` of the models at Hugging Face."""
RESERVE_GB = 3
"""CUDA's context, NCCL's buffers, fragmentation."""

ON_META = """
import json, sys, torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_bridge.megatron.model import build_model
from trainer_bridge.megatron.shapes import ModelShape
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
torch.cuda.current_device = lambda: torch.device("meta")
with torch.device("meta"):
    built = [build_model(ModelShape(**fields), torch.bfloat16, on_cpu=True) for fields in json.load(sys.stdin)]
print(json.dumps([sum(weight.numel() for weight in model.parameters()) for model in built]))
"""

COUNTED = """
import json, sys, weakref, torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils import _pytree as pytree
from trainer_bridge.batch import Sequences
from trainer_bridge.megatron import device, model as models
from trainer_bridge.megatron.shapes import ModelShape


class Peak(TorchDispatchMode):
    # Counts the bytes of tensors that operations have made and that still exist.
    def __init__(self, known):
        super().__init__()
        self.known, self.sizes, self.live, self.peak = known, {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known | self.sizes.keys():
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage._cdata)
        return out

    def free(self, address):
        self.live -= self.sizes.pop(address)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
device.initialize(torch.device("cpu"), 0)
torch.set_num_threads(1)
peaks = []
for fields, tokens in json.load(sys.stdin):
    model = models.build_model(ModelShape(**fields), torch.bfloat16, True, True)
    for weight in model.parameters():
        torch.nn.init.normal_(weight.data, std=0.02)
        weight.grad = torch.zeros_like(weight)
    known = {x.untyped_storage()._cdata for weight in model.parameters() for x in (weight, weight.grad)}
    one = torch.tensor([tokens])
    given = Sequences(torch.randint(0, fields["vocab"], (tokens,)), one, one - 1, torch.ones(1))
    with Peak(known) as counted:
        models.logprobs(model, given).sum().backward()
    peaks.append(counted.peak)
print(json.dumps(peaks))
"""


def run(program: str, given: Any) -> list[int]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_weights_are_those_of_megatrons_model_on_the_meta_device() -> None:
    built = run(ON_META, [asdict(shape) for shape in MODELS.values()])
    assert [parameters(shape, 2) for shape in MODELS.values()] == built


def test_activations_are_those_of_a_counted_step() -> None:
    """One shape whose peak is in a layer's backward pass, one with it in the loss, and a wide one."""
    shapes = [
        model(QWEN3, 4, 256, 1024, 8, vocab_size=512, head_dim=64),
        model(QWEN3, 2, 128, 256, 8, vocab_size=16384, head_dim=16),
        model(QWEN2, 3, 512, 2048, 8, vocab_size=512),
    ]
    counted = run(COUNTED, [(asdict(shape), 512) for shape in shapes])
    for shape, peak in zip(shapes, counted, strict=True):
        expected = estimate(shape, tensor_parallel=1, data_parallel=1, tokens=512, width=2).activations
        assert expected == pytest.approx(peak, rel=0.15)


def of_recipe(path: Path) -> tuple[str, MemoryEstimate]:
    config = load(path, {})
    name, tensor_parallel = Path(config.hf_checkpoint).name, config.tensor_model_parallel_size
    tokens = config.max_tokens_per_gpu
    return name, estimate(
        MODELS[name],
        tensor_parallel=tensor_parallel,
        data_parallel=config.trainer_processes // tensor_parallel,
        tokens=tokens,
        width=2,
    )


def test_recipes_fit_the_gpus_that_the_documentation_names() -> None:
    """The table of docs/training.md has these sizes. A GPU's memory is in units of 10⁹ bytes, as its vendor's."""
    page = (ROOT / "docs" / "training.md").read_text()
    for name, memory in map(of_recipe, RECIPES):
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)
        sizes = " | ".join(f"{size / 1e9:.1f}" for size in parts)
        fits = " | ".join("yes" if memory.total / 1e9 + RESERVE_GB < size else "no" for size in (80, 192))
        assert f"| {name} | {sizes} | {fits} |" in page
        assert "no" not in fits


def test_without_shares_of_the_optimiser_the_largest_recipe_does_not_fit() -> None:
    alone = estimate(MODELS["GLM-4-9B-0414"], tensor_parallel=2, data_parallel=1, tokens=20480, width=2)
    assert alone.total > 80e9
