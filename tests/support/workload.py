"""Prompts for live tests: small, of known lengths, and rounds that stop at known tokens."""

import random
from collections.abc import Sequence
from typing import Any

from tests.support.compare import Key, by_key
from tests.support.server import Server

FIRST_ORDINARY = 6
"""Token ids below are special (examples/tiny_model.py)."""


def token_ids(count: int, seed: int) -> list[int]:
    """Ordinary token ids, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST_ORDINARY, 512) for _ in range(count)]


def prompt(name: str, length: int, *, ids: Sequence[int] | int = 3, n: int = 1, **params: Any) -> dict[str, Any]:
    """A prompt whose samples have exactly `length` tokens, or with stop tokens or a grammar at most so many.

    `ids` are its tokens, or how many it has; they depend on its name alone.
    """
    fields = {key: params.pop(key) for key in ("metadata", "top_logprobs_num") if key in params}
    endless = not {"stop_token_ids", "json_schema", "regex"} & params.keys()
    return {
        "id": name,
        "input_ids": token_ids(ids, sum(map(ord, name)) * 31 + len(name)) if isinstance(ids, int) else list(ids),
        "n": n,
        "sampling_params": {"max_new_tokens": length, "ignore_eos": endless, **params},
        **fields,
    }


def stoppers(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """One prompt per stop: with `quota=1`, round k ends in the step in which the k-th prompt reaches its length."""
    return [prompt(f"stop-{length}", length) for length in lengths]


def in_one_round(server: Server, run: str, prompts: list[dict[str, Any]], **body: Any) -> dict[Key, dict[str, Any]]:
    """Return samples that were never stopped. The tree is emptied first, so that equal requests give equal batches."""
    flush(server)
    return by_key(server.rollout(run=run, prompts=prompts, quota=None, **body)["finished"])


def in_rounds(
    server: Server, run: str, prompts: list[dict[str, Any]], stops: int, **body: Any
) -> tuple[dict[Key, dict[str, Any]], list[dict[str, Any]]]:
    """The same prompts stopped and resumed `stops` times, all together, by a quota of one group each time.

    Returns the samples and the replies.
    """
    flush(server)
    replies = [server.rollout(run=run, prompts=prompts if i == 0 else [], quota=1, **body) for i in range(stops)]
    assert [r["end_reason"] for r in replies] == ["quota"] * stops
    replies.append(server.rollout(run=run, prompts=[], quota=None, **body))
    return by_key(group for reply in replies for group in reply["finished"]), replies


def flush(server: Server) -> None:
    """Empty the radix tree."""
    server.post("/flush_cache")


class Forwards:
    """Forwards of the model since construction, recorded by tests/support/launch.py."""

    def __init__(self, server: Server) -> None:
        self._server, self._before = server, len(server.forwards())

    def rows(self, *, decode: bool) -> list[int]:
        """Rows of each decode step, or of each prefill."""
        return [f["rows"] for f in self._server.forwards()[self._before :] if f["decode"] == decode]
