"""A client-side record of accepted, delivered and dropped samples.

It uses only the server's replies, so it detects samples that the server loses or delivers twice.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.support.compare import Key
from tests.support.oracle import check_spans

Group = tuple[str, int]
"""(prompt id, incarnation)."""


@dataclass
class DeliveryRecord:
    """The record of one run."""

    lengths: dict[Key, int] = field(default_factory=dict)
    """Expected output length of every accepted sample."""
    delivered: set[Key] = field(default_factory=set)
    dropped: set[Group] = field(default_factory=set)
    dropped_samples: int = 0
    incarnations: Counter[str] = field(default_factory=Counter)

    def accept(self, prompts: list[dict[str, Any]]) -> None:
        """Record accepted prompts."""
        for prompt in prompts:
            name = prompt["id"]
            for index in range(prompt["n"]):
                key = name, self.incarnations[name], index
                self.lengths[key] = prompt["sampling_params"]["max_new_tokens"]
            self.incarnations[name] += 1

    def deliver(self, reply: dict[str, Any]) -> None:
        """Record a reply; fail on unknown, duplicate or wrongly sized samples."""
        for group in reply["finished"]:
            for sample in group["samples"]:
                key = group["id"], group["incarnation"], sample["index"]
                assert key in self.lengths, f"{key} was never requested"
                assert key not in self.delivered, f"{key} was delivered twice"
                self.delivered.add(key)
                length = len(sample["output_ids"])
                assert (length, len(sample["logprobs"])) == (self.lengths[key], length), f"{key}: {length} tokens"
                check_spans(sample["spans"], length)

    def drop(self, answer: dict[str, Any]) -> None:
        """Record deleted groups."""
        self.dropped |= {(name, incarnation) for name, incarnation in answer["groups"]}
        self.dropped_samples += answer["samples"]

    @property
    def missing(self) -> set[Key]:
        """Samples that have not been delivered."""
        return self.lengths.keys() - self.delivered

    @property
    def in_use(self) -> set[str]:
        """Prompt ids that have an undelivered sample which was not dropped."""
        return {name for name, incarnation, _ in self.missing if (name, incarnation) not in self.dropped}

    def close(self) -> None:
        """Nothing is left on the server: every sample was delivered once, or dropped once."""
        lost = {key for key in self.missing if key[:2] not in self.dropped}
        assert not lost, f"lost: {sorted(lost)[:5]}"
        assert self.dropped_samples == len(self.missing), f"{self.dropped_samples} dropped, {len(self.missing)} missing"
