"""Decode attention for the CPU platform: SGLang's `torch_native` with a faster decode.

The parent gathers keys and values, repeats grouped heads and calls SDPA once per request and layer, in several small
operations each. Here float32 uses a separate kernel (decode_kernel.py). For half precision the slots of a step are
looked up once for all layers, keys and values are gathered once per layer, and each request is one SDPA over a view of
its own tokens, the query heads of a KV head as rows. A request's result depends only on its own tokens, as in
the parent, which handles all other cases.

SGLang recognizes by the name `torch_native` that no Triton kernel may be launched, so the backend keeps that name:
`install` registers a factory under it, which returns this backend only if the platform, not the user, chose it.
"""

import os
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from sglang_april.cpu import CHOSEN_BY_PLATFORM, pace
from sglang_april.cpu.decode_kernel import decode_attention, supports


def install() -> None:
    """Register the factory; each worker calls this before it creates a backend."""
    register_attention_backend("torch_native")(make_backend)


def make_backend(runner: Any) -> TorchNativeAttnBackend:
    """This backend if the platform chose it, SGLang's if the user asked for `torch_native` by name.

    Either sees the model runner before its first forward, so a pace is installed here.
    """
    if (table := pace.chosen()) is not None:
        pace.install(runner, table)
    chosen = os.environ.get(CHOSEN_BY_PLATFORM) == "1"
    return (TorchCpuAttention if chosen else TorchNativeAttnBackend)(runner)


class TorchCpuAttention(TorchNativeAttnBackend):
    """SGLang's `torch_native` backend with a faster decode."""

    _step: tuple[torch.Tensor, list[int]] | None = None
    """Slots of all requests, concatenated, int [tokens], and their lengths; equal for all layers of a step."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Called before each forward: drop the slots of the previous step."""
        super().init_forward_metadata(forward_batch)
        self._step = None

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """One new token per request, with its own KV already in the cache.

        Args:
            query, output: [requests, query heads, head size]; `output` is written.
            k_cache, v_cache: [slots, KV heads, head size].
            req_to_token: int [rows, context], the slots of each row's tokens.
            req_pool_indices, seq_lens: int [requests], the row of each request and its tokens.
        """
        windowed = sliding_window_size is not None and sliding_window_size > -1
        cast = not query.dtype == k_cache.dtype == v_cache.dtype
        if windowed or cast or causal or is_cross_attn or encoder_lens is not None:
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                scaling,
                enable_gqa,
                causal,
                is_cross_attn,
                sliding_window_size,
            )
        if scaling is not None and supports(query, k_cache, v_cache, req_to_token):
            return output.copy_(
                decode_attention(query, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scaling)
            )
        if self._step is None:
            self._step = ragged_slots(req_to_token, req_pool_indices, seq_lens)
        slots, lengths = self._step
        # [tokens, KV heads, size] → [1, KV heads, tokens, size]
        keys = k_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0)
        values = v_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0)
        # The query heads that share a KV head become rows of it: [1, KV heads, heads / KV heads, size] per request.
        queries = query.unflatten(1, (k_cache.shape[1], -1)).split(1)
        each = zip(queries, keys.split(lengths, 2), values.split(lengths, 2), strict=True)
        answers = [scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in each]
        return output.copy_(torch.cat(answers).flatten(1, 2))


def ragged_slots(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """The slots of all requests, concatenated, int [sum of lengths], and the lengths.

    Indexes the flat table: a padded table would cost as much per request as the longest one.
    """
    lengths = seq_lens.tolist()
    # Distance between a token's position in the flat table and in the result, equal for all tokens of a request.
    shift = req_pool_indices * req_to_token.stride(0) - (seq_lens.cumsum(0) - seq_lens)
    where = torch.repeat_interleave(shift, seq_lens, output_size=sum(lengths))
    where += torch.arange(len(where), device=where.device)
    return req_to_token.view(-1).index_select(0, where), lengths
