"""Estimates the memory of a trainer rank's GPU during a step, from the shape of the model.

Weights and optimiser follow from Megatron's configuration in `megatron/policy.py`. The coefficients of activations
were measured by counting live bytes of forward and backward passes on the CPU with `recompute_granularity: full` and
PyTorch's attention (`tests/bridge/test_memory.py` repeats this). Not measured on a GPU; CUDA's context, NCCL's buffers
and fragmentation take about 3 GB more.
"""

from dataclasses import dataclass

from trainer_bridge.megatron.shapes import ModelShape

GRADIENT = 4
"""Bytes per weight: gradients are accumulated in float32."""
STATES = 8
"""Bytes per weight: Adam's two moments in float32."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the GPU of one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    """Adam's moments and, with 16-bit weights, weights in float32; shared by data-parallel ranks."""
    activations: int
    """Activations of one micro-batch, at their peak."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(shape: ModelShape, *, tensor_parallel: int, data_parallel: int, tokens: int, width: int) -> MemoryEstimate:
    """The estimate for one rank, with `recompute_granularity: full`.

    Args:
        shape: shape of the model.
        tensor_parallel: ranks that share each layer.
        data_parallel: ranks that share the states of the optimiser.
        tokens: tokens of a micro-batch, prompts and responses.
        width: bytes of a weight: 2 in bfloat16, 4 in float32.
    """
    weights = parameters(shape, tensor_parallel)
    master = 4 if width < 4 else 0
    return MemoryEstimate(
        weights=width * weights,
        gradients=GRADIENT * weights,
        optimizer=(STATES + master) * weights // data_parallel,
        activations=tokens * max(_layers(shape, tensor_parallel, width), _output(shape, tensor_parallel, width)),
    )


def parameters(shape: ModelShape, tensor_parallel: int) -> int:
    """Weights on one rank."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = shape.hidden * (2 * queries + 2 * keys + 3 * shape.mlp)
    biases = queries + 2 * keys if shape.qkv_bias else 0
    norms = (4 if shape.sandwich else 2) * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    vocabulary = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    shared = shape.layers * (matrices + biases) + vocabulary
    return shared // tensor_parallel + shape.layers * norms + shape.hidden


def _layers(shape: ModelShape, tensor_parallel: int, width: int) -> int:
    """Bytes per token while a layer's backward pass runs: inputs of all layers, and one layer computed again."""
    queries, keys = (n * shape.head_dim // tensor_parallel for n in (shape.heads, shape.kv_heads))
    one = 11.5 * shape.hidden + 7 * shape.mlp / tensor_parallel + 9.5 * queries + 4 * keys
    return int(width * (shape.layers * shape.hidden + one))


def _output(shape: ModelShape, tensor_parallel: int, width: int) -> int:
    """Bytes per token while the loss's backward pass runs: inputs of all layers, and logits in three forms."""
    return width * shape.layers * shape.hidden + (4 + 2 * width) * shape.vocab // tensor_parallel
