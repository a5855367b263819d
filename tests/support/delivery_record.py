"""A client's own books of a server: what was accepted, what came back, what was dropped.

They use nothing that the server says of itself but its replies, so they notice what it loses or counts twice.
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
    """One run's books."""

    lengths: dict[Key, int] = field(default_factory=dict)
    """Every sample ever accepted, and how many tokens it must have."""
    delivered: set[Key] = field(default_factory=set)
    dropped: set[Group] = field(default_factory=set)
    dropped_samples: int = 0
    incarnations: Counter[str] = field(default_factory=Counter)

    def accept(self, prompts: list[dict[str, Any]]) -> None:
        """The server has taken these prompts."""
        for prompt in prompts:
            name = prompt["id"]
            for index in range(prompt["n"]):
                key = name, self.incarnations[name], index
                self.lengths[key] = prompt["sampling_params"]["max_new_tokens"]
            self.incarnations[name] += 1

    def deliver(self, reply: dict[str, Any]) -> None:
        """A reply has come: nothing in it is unknown, comes twice, or is of a wrong length."""
        for group in reply["finished"]:
            for sample in group["samples"]:
                key = group["id"], group["incarnation"], sample["index"]
                assert key in self.lengths, f"{key} was never asked for"
                assert key not in self.delivered, f"{key} was delivered twice"
                self.delivered.add(key)
                length = len(sample["output_ids"])
                assert (length, len(sample["logprobs"])) == (self.lengths[key], length), f"{key}: {length} tokens"
                check_spans(sample["spans"], length)

    def drop(self, answer: dict[str, Any]) -> None:
        """The server has deleted these groups."""
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
