"""Decode attention over a paged cache in float32, compiled by numba for the CPU platform.

Gathering a step's keys and values takes as long as computing with them, and one SDPA call per request as long again
(bench.timeline, py-spy). Here every token is read once, where it lies. A request's sums run over its own tokens in
their order, so its result depends neither on the batch around it nor on where its tokens lie.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from april_kernels.compiled import compiled

Floats = NDArray[np.float32]
Ints = NDArray[np.integer[Any]]

_SIGNATURE = "(f4[:,:,::1], f4[:,:,::1], f4[:,:,::1], i4[:,::1], i8[::1], i8[::1], f4, f4[:,:,::1])"
_SUMS_IN_VECTORS = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math flags that let a dot product be one of vectors; infinities and NaN keep their meaning."""


def fits(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether the kernel takes these: float32 and int32, contiguous."""
    floats = all(x.dtype is torch.float32 and x.is_contiguous() for x in (query, k_cache, v_cache))
    return floats and table.dtype is torch.int32 and table.is_contiguous()


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v, request by request: float32 [requests, query heads, value size].

    Args:
        query: float32 [requests, query heads, size].
        k_cache, v_cache: float32 [slots, KV heads, size or value size].
        table: int32 [rows, context], the slots of each row's tokens.
        rows, lengths: int [requests], the row of each request and its tokens, at least one.
    """
    out = torch.empty(*query.shape[:2], v_cache.shape[2])
    arrays = query.numpy(), k_cache.numpy(), v_cache.numpy(), table.numpy()
    _decode(*arrays, rows.long().numpy(), lengths.long().numpy(), scale, out.numpy())
    return out


@compiled(_SIGNATURE, fastmath=_SUMS_IN_VECTORS)
def _decode(
    query: Floats, keys: Floats, values: Floats, table: Ints, rows: Ints, lengths: Ints, scale: float, out: Floats
) -> None:
    heads, size, shared = query.shape[1], query.shape[2], query.shape[1] // keys.shape[1]
    weights = np.empty(table.shape[1], np.float32)
    for request in range(query.shape[0]):
        slots, length = table[rows[request]], lengths[request]
        for head in range(heads):
            q, kv_head, answer = query[request, head], head // shared, out[request, head]
            largest = np.float32(-np.inf)
            for at in range(length):
                key = keys[slots[at], kv_head]
                product = np.float32(0)
                for i in range(size):
                    product += q[i] * key[i]
                weights[at] = product * scale
                largest = max(largest, weights[at])
            total = np.float32(0)
            answer[:] = 0
            for at in range(length):
                weight = np.exp(weights[at] - largest)
                total += weight
                value = values[slots[at], kv_head]
                for i in range(values.shape[2]):
                    answer[i] += weight * value[i]
            for i in range(values.shape[2]):
                answer[i] /= total
