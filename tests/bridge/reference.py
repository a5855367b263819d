"""Sequences for tests of the trainer, and the results of Hugging Face's models for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_bridge.batch import MicroBatch, Sequences, Tokens
from trainer_bridge.losses import token_weights

LENGTHS, RESPONSES, TEMPERATURES = [33, 7, 120, 2], [20, 6, 50, 1], [1.0, 0.8, 1.3, 1.0]


def sequences(seed: int = 0) -> Sequences:
    """Four sequences of random tokens, the last with one prompt token and one response token."""
    ids = torch.randint(3, 512, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    return Sequences(ids, torch.tensor(LENGTHS), torch.tensor(RESPONSES), torch.tensor(TEMPERATURES))


def micro_batches(count: int = 4) -> list[MicroBatch]:
    """`count` micro-batches of one step, with random advantages and behaviour logprobs; one token is masked."""
    total = sum(RESPONSES)
    masks = [np.ones(n, bool) for n in RESPONSES * count]
    masks[0][3] = False
    weights = np.concatenate(token_weights(masks, "token")).reshape(count, total)
    batches = []
    for i in range(count):
        generator = torch.Generator().manual_seed(100 + i)
        behaviour = -6.2 + 0.1 * torch.randn(total, generator=generator)
        tokens = Tokens(
            behaviour=behaviour,
            proximal=behaviour,
            advantages=torch.randn(len(RESPONSES), generator=generator).repeat_interleave(torch.tensor(RESPONSES)),
            weights=torch.from_numpy(weights[i]),
            sequence=torch.arange(len(RESPONSES)).repeat_interleave(torch.tensor(RESPONSES)),
            age=torch.full((total,), i % 3),
            kv=torch.zeros(total, dtype=torch.int8),
            count=len(RESPONSES),
        )
        batches.append(MicroBatch(sequences(i), tokens))
    return batches


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def hf_logits(model: Any, given: Sequences) -> torch.Tensor:
    """[N, vocab], each sequence by itself."""
    return torch.cat([model(ids[None]).logits[0] for ids in given.ids.split(given.lengths.tolist())])


def hf_logprobs(model: Any, given: Sequences) -> torch.Tensor:
    """[T], written with loops over sequences."""
    parts = []
    lengths = given.lengths.tolist()
    for ids, rows, n, t in zip(
        given.ids.split(lengths),
        hf_logits(model, given).split(lengths),
        given.responses.tolist(),
        given.temperature.tolist(),
        strict=True,
    ):
        logprobs = (rows[-n - 1 : -1] / t).log_softmax(-1)
        parts.append(logprobs.gather(1, ids[-n:, None])[:, 0])
    return torch.cat(parts)
