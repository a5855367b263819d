"""Keys of runs, by which the journal tells prompts, attached requests and legs apart."""

import pytest

from sglang_april.api.run_keys import RunKind, parse_run_key, run_key

KEYS: dict[str, tuple[RunKind, str]] = {
    "r": ("prompts", "r"),
    "attached r": ("prompts", "attached r"),
    "\0attached r": ("requests", "r"),
    "\0attached \0r": ("legs", "r"),
}
"""As in journals of earlier versions."""


@pytest.mark.parametrize("key", KEYS)
def test_keys_are_those_of_earlier_journals(key: str) -> None:
    assert (parse_run_key(key), run_key(*KEYS[key])) == (KEYS[key], key)
