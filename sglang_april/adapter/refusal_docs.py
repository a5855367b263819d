"""The list in docs/limits.md of what is refused at start: `python -m sglang_april.adapter.refusal_docs` writes it."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_april.adapter import versions
from sglang_april.adapter.refusals import Refusal, Rule

PAGE = "docs/limits.md"
BEGIN, END = "<!-- refused at start -->\n", "<!-- /refused at start -->\n"


def updated(page: str) -> str:
    """The page with the list of the installed release's adapter package."""
    before, rest = page.split(BEGIN)
    return (
        before
        + BEGIN
        + "\n"
        + _tables(_module("refusals"), _module("supported_pools"))
        + "\n"
        + END
        + rest.split(END)[1]
    )


def _tables(refusals: Any, pools: Any) -> str:
    models = [f"| {refusal.what[0].lower()}{refusal.what[1:]} | all | {refusal.why} |" for refusal in _models(refusals)]
    classes: dict[str, list[str]] = {}
    for name, why in pools.REFUSED_POOLS.items():
        classes.setdefault(why, []).append(f"`{name}`")
    return "\n".join(
        [
            *_header("argument, variable or model", "refused values", "why"),
            *(_row(rule, "--") for rule in _refused(refusals.ARGUMENTS)),
            *(_row(rule, "") for rule in _refused(refusals.ENVIRONMENT)),
            *models,
            "",
            *_header("KV pool", "why"),
            *(f"| {', '.join(names)} | {why} |" for why, names in classes.items()),
            "",
        ]
    )


def _refused(rules: Sequence[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.refused]


def _row(rule: Rule, prefix: str) -> str:
    names = (prefix + name.replace("_", "-") if prefix else name for name in rule.names)
    return f"| {', '.join(f'`{name}`' for name in names)} | {rule.refused} | {rule.why} |"


def _models(refusals: Any) -> list[Refusal]:
    return [refusal for _, refusal in refusals.MODELS]


def _header(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]


def _module(name: str) -> Any:
    return importlib.import_module(f"{versions.CORE}.{name}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    file = Path(__file__).parents[2] / PAGE
    file.write_text(updated(file.read_text()))
