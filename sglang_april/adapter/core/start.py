"""What the plugin's entry point needs of SGLang, before any hook runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ENVIRONMENT: Mapping[str, str] = {"SYNC_TOKEN_IDS_ACROSS_TP": "1"}
"""Variables to set before the rest of SGLang is imported. Every rank must see the same sampled tokens; the sampler
reads this one when it is imported (`rank-determinism`)."""


@contextmanager
def applying_hooks() -> Iterator[None]:
    """Skip SGLang's search of all modules for copies of a hooked method: 0.25 s each, in every process.

    SGLang searches because `from module import function` copies a reference; methods are not imported that way.
    """
    from sglang.srt.plugins import hook_registry

    search = hook_registry._propagate_patch

    def search_for_functions(original: Any, wrapped: Any, owner: Any) -> int:
        return 0 if isinstance(owner, type) else search(original, wrapped, owner)

    hook_registry._propagate_patch = search_for_functions
    try:
        yield
    finally:
        hook_registry._propagate_patch = search
