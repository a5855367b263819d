"""Decode attention over a paged cache in float32, compiled by numba for the CPU platform.

Gathering a step's keys and values takes as long as computing with them, and one SDPA call per request as long again
(bench.timeline, py-spy). This kernel reads every token once, in place, and prefetches some tokens ahead: the tokens of
a request are a batch apart in memory, which hardware prefetchers do not predict. Without prefetching, three quarters of
the time is memory latency (64 rows of 850 tokens, two layers: 20.7 ms without, 5.4 ms with). A request's sums run over
its own tokens in order, so its result depends neither on the rest of the batch nor on the slots of its tokens.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from april_kernels.compiled import compiled, inlined, prefetch

Floats = NDArray[np.float32]
Ints = NDArray[np.integer[Any]]

_SIGNATURE = "(f4[:,:,::1], f4[:,:,::1], f4[:,:,::1], i4[:,::1], i8[::1], i8[::1], f4, f4[:,:,::1])"
_PREFETCH_DISTANCE = 12
"""Tokens. 8, 12, 24 and 48 differ by a tenth; without prefetching a step takes three times as long."""
_CACHE_LINE = 16
"""float32 numbers of a cache line."""
_SUMS_IN_VECTORS = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math flags that let a dot product be one of vectors; infinities and NaN keep their meaning."""


def supports(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether the kernel supports these tensors: float32 and int32, contiguous."""
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


@inlined(_SUMS_IN_VECTORS)
def _prefetch_row(rows: Floats, slots: Ints, at: np.uint64, length: int) -> None:
    """Prefetch the row of a later token. `rows` is flat, `length` numbers per row."""
    if at < np.uint64(slots.shape[0]):
        first = np.uint64(slots[at]) * np.uint64(length)
        for line in range(0, length, _CACHE_LINE):
            prefetch(rows, first + np.uint64(line))


@inlined(_SUMS_IN_VECTORS)
def _scores(query: Floats, keys: Floats, slots: Ints, scale: float, weights: Floats) -> None:
    """weights[head, token] = scale · q k."""
    size, kv_heads = query.shape[1], keys.shape[1]
    shared, flat = query.shape[0] // kv_heads, keys.reshape(-1)
    for at in range(np.uint64(slots.shape[0])):
        _prefetch_row(flat, slots, at + np.uint64(_PREFETCH_DISTANCE), kv_heads * size)
        slot = np.uint64(slots[at])
        for kv_head in range(kv_heads):
            for head in range(kv_head * shared, (kv_head + 1) * shared):
                product = np.float32(0)
                for i in range(size):
                    product += query[head, i] * keys[slot, kv_head, i]
                weights[head, at] = product * scale


@inlined(_SUMS_IN_VECTORS)
def _softmax(weights: Floats, powers: Ints) -> None:
    """Softmax of one head, in place. exp is 2^x, x split into a whole number, which becomes the exponent's bits
    (`powers`), and the rest, approximated by the polynomial of Cephes' exp2f (netlib.org/cephes): without branches,
    so that it vectorises.
    """
    largest, total = np.float32(-np.inf), np.float32(0)
    for weight in weights:
        largest = max(largest, weight)
    for at in range(weights.shape[0]):
        x = (weights[at] - largest) * np.float32(1.44269504)  # log2(e)
        x = np.float32(-126) if x < np.float32(-126) else x  # the least exponent; NaN stays
        whole = np.floor(x + np.float32(0.5))
        rest = x - whole
        power = np.float32(1.535336188e-4)
        power = power * rest + np.float32(1.339887440e-3)
        power = power * rest + np.float32(9.618437357e-3)
        power = power * rest + np.float32(5.550332471e-2)
        power = power * rest + np.float32(2.402264791e-1)
        power = power * rest + np.float32(6.931472029e-1)
        weights[at] = power * rest + np.float32(1)
        powers[at] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    factors = powers.view(np.float32)
    for at in range(weights.shape[0]):
        weights[at] *= factors[at]
        total += weights[at]
    for at in range(weights.shape[0]):
        weights[at] /= total


@inlined(_SUMS_IN_VECTORS)
def _weighted_sum(weights: Floats, values: Floats, slots: Ints, out: Floats) -> None:
    """out[head] = Σ weights[head, token] · v."""
    kv_heads, size = values.shape[1], values.shape[2]
    shared, flat = out.shape[0] // kv_heads, values.reshape(-1)
    out[:] = 0
    for at in range(np.uint64(slots.shape[0])):
        _prefetch_row(flat, slots, at + np.uint64(_PREFETCH_DISTANCE), kv_heads * size)
        slot = np.uint64(slots[at])
        for kv_head in range(kv_heads):
            for head in range(kv_head * shared, (kv_head + 1) * shared):
                for i in range(size):
                    out[head, i] += weights[head, at] * values[slot, kv_head, i]


@compiled(_SIGNATURE, fastmath=_SUMS_IN_VECTORS)
def _decode(
    query: Floats, keys: Floats, values: Floats, table: Ints, rows: Ints, lengths: Ints, scale: float, out: Floats
) -> None:
    weights = np.empty((query.shape[1], table.shape[1]), np.float32)
    powers = np.empty(table.shape[1], np.int32)
    for request in range(query.shape[0]):
        slots = table[rows[request], : lengths[request]]
        _scores(query[request], keys, slots, scale, weights)
        for head in range(query.shape[1]):
            _softmax(weights[head, : slots.shape[0]], powers)
        _weighted_sum(weights, values, slots, out[request])
