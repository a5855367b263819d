"""The kinds of runs, and the key of each run in the ledger and the journal.

What callers call a run is up to three runs in the scheduler: of prompts, of requests of SGLang's own routes, and of the
legs of trajectories.
"""

from typing import Literal

RunKind = Literal["prompts", "requests", "legs"]

_PREFIXES: dict[RunKind, str] = {"legs": "\0attached \0", "requests": "\0attached ", "prompts": ""}
"""How the keys of a kind begin, in the order in which `parse_run_key` tries them; no caller's name begins with NUL."""


def run_key(kind: RunKind, name: str) -> str:
    """The key of the run of this kind that callers call `name`."""
    return _PREFIXES[kind] + name


def parse_run_key(key: str) -> tuple[RunKind, str]:
    """The arguments of `run_key` that give this key."""
    kind, prefix = next((kind, prefix) for kind, prefix in _PREFIXES.items() if key.startswith(prefix))
    return kind, key.removeprefix(prefix)
