"""The stream of prompts: random token ids and a length for each response, the same for every variant and run."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.rollout.lengths import Lengths

FIRST_TOKEN, VOCAB = 8, 512
"""Prompt tokens are drawn from [FIRST_TOKEN, VOCAB), which excludes the special tokens of the tiny model."""
REJECTED_SHARE = 0.4
"""`dapo`: share of groups that are rejected because all their rewards are equal."""


@dataclass(frozen=True)
class WorkloadPrompt:
    """One prompt and the length of each response to it (`ignore_eos`, `max_new_tokens`)."""

    id: str
    input_ids: list[int]
    lengths: list[int]

    @property
    def rejected(self) -> bool:
        """Whether a filter rejects the group; the same in every variant."""
        digest = hashlib.blake2b(self.id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64 < REJECTED_SHARE


class Stream:
    """Prompts in a fixed order, endless unless `ends_after` is set; `taken` counts them."""

    def __init__(self, seed: int, lengths: Lengths, n: int, prompt_tokens: int) -> None:
        self.taken = 0
        self.ends_after: int | None = None
        self._prompts = self._generate(random.Random(f"rollout-{seed}"), lengths, n, prompt_tokens)

    def take(self, count: int) -> list[WorkloadPrompt]:
        """The next prompts."""
        if self.ends_after is not None:
            count = min(count, self.ends_after - self.taken)
        count = max(0, count)
        self.taken += count
        return [next(self._prompts) for _ in range(count)]

    @staticmethod
    def _generate(rng: random.Random, lengths: Lengths, n: int, prompt_tokens: int) -> Iterator[WorkloadPrompt]:
        number = 0
        while True:
            ids = [rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(prompt_tokens)]
            yield WorkloadPrompt(f"p{number}", ids, [lengths.draw(rng) for _ in range(n)])
            number += 1
