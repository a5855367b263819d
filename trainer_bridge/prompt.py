"""A prompt, in a module that imports nothing: the processes that compute rewards need no more."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One prompt as it is handed over, and what its reward is told."""

    id: str
    """`e<epoch>-<row>`: a row comes back in the next epoch as another prompt, with other noise."""
    content: Any
    """Text, messages or token ids."""
    label: Any
    metadata: Any

    def body(self, n: int) -> dict[str, Any]:
        """The prompt of a rollout request with `n` samples."""
        if isinstance(self.content, str):
            field = "text"
        elif self.content and isinstance(self.content[0], Mapping):
            field = "messages"
        else:
            field = "input_ids"
        return {"id": self.id, field: self.content, "n": n}
