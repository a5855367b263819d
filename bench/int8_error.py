"""The error of `--april-kv-pages int8`: KV through the real page store, and logprobs computed on the restored KV.

    python -m bench.int8_error --record

Hugging Face's forward draws sequences from the tiny model. The KV of their first half is stored as int8 pages and
restored; the second half is then fed on it, token for token, and its logprobs are compared with those on the original
KV. The same with `full` pages is a separate row: its error must be 0, or the measurement is wrong.
"""

import argparse
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from april_kernels.kv_pages import PlaneTable
from bench import record
from examples import interrupt
from examples.tiny_model import DTYPES, make
from sglang_april.kv.copiers import CpuCopier
from sglang_april.kv.host_tier import HostArena
from sglang_april.kv.page_format import PAGE_FORMATS
from sglang_april.kv.page_store import PageStore

PAGE = 16


def through_the_store(name: str, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy planes [tokens, heads, dim] to the host tier and back into other slots; returns the restored planes."""
    tokens = len(planes[0])
    pools = [torch.cat([plane, torch.zeros_like(plane)]) for plane in planes]
    copier = CpuCopier(PAGE_FORMATS[name](PlaneTable.of(pools), PAGE))
    ends: dict[int, str] = {}
    store = PageStore(copier, HostArena(-(-tokens // PAGE), copier.page_words, pinned=False), None, ends.__setitem__)
    there = torch.arange(tokens, 2 * tokens)
    store.copy_to_host(1, 1, torch.arange(tokens), None)
    store.load(2, 1, there)
    store.close()
    if failed := [why for why in ends.values() if why]:
        raise RuntimeError(failed[0])
    return [pool[there] for pool in pools]


def kv_of(cache: Any) -> list[torch.Tensor]:
    """K and V of each layer, alternating, each [tokens of all sequences, heads, dim]."""
    return [x.transpose(1, 2).flatten(0, 1) for layer in cache.layers for x in (layer.keys, layer.values)]


def cache_of(planes: Sequence[torch.Tensor], sequences: int) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    each = [plane.unflatten(0, (sequences, -1)).transpose(1, 2).contiguous() for plane in planes]
    for number in range(len(each) // 2):
        cache.update(each[2 * number], each[2 * number + 1], number)
    return cache


@torch.no_grad()
def measure(dtype: str, sequences: int, length: int, seed: int) -> list[record.Row]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / "model", dtype=dtype, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager")
    start = torch.randint(10, model.config.vocab_size, (sequences, 1))
    ids = model.generate(start, do_sample=True, min_length=length, max_length=length, pad_token_id=2, top_k=0)
    half = length // 2
    kept = kv_of(model(ids[:, :half], use_cache=True).past_key_values)
    chosen = ids[:, half + 1 :, None]

    def logprobs(planes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logprobs, float64 [sequences, tokens, vocabulary]."""
        out = model(ids[:, half:-1], past_key_values=cache_of(planes, sequences), use_cache=True)
        return out.logits.double().log_softmax(-1)

    wanted, rows = logprobs(kept), []
    for name in PAGE_FORMATS:
        back = through_the_store(name, kept)
        errors = [(b - a).double() for a, b in zip(kept, back, strict=True)]
        sizes = [a.double() for a in kept]
        found = logprobs(back)
        drift = (found - wanted).gather(-1, chosen).abs().flatten()
        rows.append(
            {
                "pages": name,
                "dtype": dtype,
                "kv_error_of_head_max": max(
                    float((e.abs() / a.abs().amax(-1, keepdim=True)).max()) for e, a in zip(errors, sizes, strict=True)
                ),
                "kv_error_rms": max(
                    float(e.square().mean().sqrt() / a.square().mean().sqrt())
                    for e, a in zip(errors, sizes, strict=True)
                ),
                "logprob_drift_mean": float(drift.mean()),
                "logprob_drift_p99": float(drift.quantile(0.99)),
                "logprob_drift_max": float(drift.max()),
                "same_greedy_token": float((found.argmax(-1) == wanted.argmax(-1)).double().mean()),
                "tokens": drift.numel(),
            }
        )
    return rows


def main(given: list[str] | None = None) -> int:
    """Print one line per page format and dtype; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.int8_error", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=16, help="number of sequences (%(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sequences (%(default)s)")
    parser.add_argument("--record", action="store_true", help="append the rows to bench/results/int8_error.json")
    args = parser.parse_args(given)
    config = {"sequences": args.sequences, "length": args.length, "seed": args.seed}
    common = {"bench": "int8_error", "run_id": uuid.uuid4().hex[:12], **record.provenance(), "config": config}
    for dtype in DTYPES:
        began = time.perf_counter()
        rows = measure(dtype, **config)
        for row in rows:
            print(
                "  ".join(
                    f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in row.items()
                )
            )
        print(f"{time.perf_counter() - began:.1f} s", flush=True)
        if args.record:
            record.append_rows(record.RESULTS / "int8_error.json", [{**common, **row} for row in rows])
    return 0


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
