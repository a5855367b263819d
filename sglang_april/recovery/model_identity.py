"""The model that a journal belongs to: what its tokens mean depends on the vocabulary, its KV on the shape.

Weights are no part of it, because every push changes them.
"""

import hashlib
from collections.abc import Mapping

import msgspec


class ModelIdentity(msgspec.Struct):
    """The path of a model, and the properties that must not differ, by the names that a refusal uses."""

    path: str
    properties: dict[str, str]

    def difference(self, other: "ModelIdentity") -> str:
        """The first property that differs from those of the `other` model, with both values; empty if there is none."""
        for name in {**self.properties, **other.properties}:
            own, others = self.properties.get(name, "unknown"), other.properties.get(name, "unknown")
            if own != others:
                return f"{name} {own} in {self.path} and {others} in {other.path}"
        return ""


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Digest of a tokenizer's token ids. It does not depend on how a release of `transformers` writes its files."""
    rows = sorted((index, token) for token, index in vocabulary.items())
    return hashlib.blake2b(msgspec.msgpack.encode(rows), digest_size=8).hexdigest()
