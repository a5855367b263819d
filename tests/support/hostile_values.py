"""Values of requests, most of them malformed (`neighbours.py`)."""

from typing import Any

RIDS: tuple[Any, ...] = (
    *(
        "april",
        "april.",
        "april.0.0",
        "april.2.1",
        "april..",
        "",
        "a",
        "rid",
        "rid",
        "é\n",
        "x" * 5000,
    ),
    *(["april.0.0", "b"], ["b", "b"], [], 7, None, {"a": 1}),
)
IDS: tuple[Any, ...] = (
    [],
    [1],
    [7] * 40,
    [7] * 300,
    [5] * 5000,
    [511],
    [512],
    [10**9],
    [2**63],
    ["1"],
    [[1], [2, 3]],
    None,
)
LENGTHS: tuple[Any, ...] = (0, 1, 3, 20, 200, 10**6, 2**31, -1, 1.5, "7", None)
NAMES: tuple[Any, ...] = (
    "agents",
    "neighbour",
    "",
    "a" * 256,
    "a" * 257,
    "\0attached agents",
    "april.0",
    "é",
    7,
    None,
    ["a"],
)
"""Of runs, trajectories and groups."""
PLAIN_NAMES = tuple(name for name in NAMES if isinstance(name, str) and name.isascii() and "\0" not in name)
"""Those that fit into a header."""
CUSTOM: tuple[Any, ...] = (None, {}, "x-april-run", 7, [], [{"x-april-run": "agents"}], {"thinking_budget": 3})
"""`custom_params` that name no run."""
RARE: dict[str, tuple[Any, ...]] = {
    "custom_params": (*CUSTOM, "x", {"a": {"b": {"c": 1}}}),
    "top_k": (1, 7, 2**31, "1", 1.5),
    "top_p": (0.5, 0, "1"),
    "min_new_tokens": (1, 2**40, "1"),
    "stop_token_ids": ([1], [512], [10**9], ["a"], 7),
    "stop_regex": ("1+", "(", 7),
    "logit_bias": ({"1": 5.0}, {"1": 1e300}, {"1": "x"}, {"512": 1.0}, {"x": 1}, [1]),
    "repetition_penalty": (1.1, 1e-44, "x"),
    "frequency_penalty": (0.5, 3),
    "sampling_seed": (2**63, 2**70, "x"),
    "json_schema": ({"type": "object"}, "{", 7),
    "ebnf": ("root ::= [0-9]+", "("),
    "structural_tag": ("{}", 7),
    "stream_interval": (3, 0, "x"),
    "skip_special_tokens": (False, "no"),
}
"""Sampling parameters that few requests have."""
MODES = ("abort", "in_place", "retract", "none", 3)
