"""Refuses configurations that were not reviewed, or that cannot be served, with one sentence (`fail-closed`).

Arguments and environment variables are allowed by list. The adapter reviews every argument of the supported SGLang
releases in rules; a value that differs from SGLang's default needs a rule that accepts it. Unsupported requests (for
example for hidden states) are answered with 400 by `http/`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from sglang_april.adapter.shapes.interface import Argument

Accepts = Callable[[Any, Any], bool]
"""(value, ServerArgs) → whether the value is supported."""

UNREVIEWED = "its effect on suspended samples has not been reviewed"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`what` is refused, because of `why`."""

    what: str
    why: str

    def sentence(self) -> str:
        """The one sentence on stderr."""
        return f"{self.what} is not supported: {self.why}."


@dataclasses.dataclass(frozen=True)
class Rule:
    """The review of some arguments or variables: which values are supported, and why (not)."""

    names: tuple[str, ...]
    """Fields of ServerArgs, or environment variables; `*` matches any characters."""
    why: str
    """Why every value is supported, or why some are not."""
    accepts: Accepts
    refused: str
    """Which values are refused, for the documentation; empty if none are."""


def accept(names: str, why: str) -> Rule:
    """Every value is supported."""
    return Rule(tuple(names.split()), why, lambda *_: True, "")


def refuse(names: str, why: str) -> Rule:
    """Only SGLang's default is supported."""
    return Rule(tuple(names.split()), why, lambda *_: False, "all but the default")


def accept_only(names: str, values: Sequence[Any], why: str) -> Rule:
    """Only SGLang's default and these values are supported."""
    listed = ", ".join(f"`{value}`" for value in values)
    return Rule(tuple(names.split()), why, lambda value, _: value in values, f"all but {listed}")


def refuse_if(names: str, accepts: Accepts, refused: str, why: str) -> Rule:
    """What `accepts` accepts is supported; `refused` describes the rest."""
    return Rule(tuple(names.split()), why, accepts, refused)


@dataclasses.dataclass(frozen=True)
class Setting:
    """An argument or environment variable that is not SGLang's default."""

    name: str
    value: Any
    label: str
    """The name as a user would type it."""


def changed_arguments(arguments: Iterable[Argument]) -> Iterable[Setting]:
    """The arguments that differ from their defaults."""
    for name, value, default in arguments:
        if value == default or (_is_unset(value) and _is_unset(default)):
            continue
        flag = "--" + name.replace("_", "-")
        yield Setting(name, value, flag if value is True else f"{flag} {value}")


def find(settings: Iterable[Setting], rules: Sequence[Rule], server_args: Any) -> Refusal | None:
    """The first setting that no rule accepts, or None."""
    for setting in settings:
        rule = rule_for(setting.name, rules)
        if rule is None:
            return Refusal(setting.label, UNREVIEWED)
        if not rule.accepts(setting.value, server_args):
            return Refusal(setting.label, rule.why)
    return None


def rule_for(name: str, rules: Sequence[Rule]) -> Rule | None:
    """The rule that lists the name itself, else the first whose pattern matches it."""
    exact = (rule for rule in rules if name in rule.names)
    matching = (rule for rule in rules if any(fnmatchcase(name, pattern) for pattern in rule.names))
    return next(exact, None) or next(matching, None)


def stop_if(refusal: Refusal | None) -> None:
    """End the start with the refusal's sentence, if there is one."""
    if refusal is not None:
        raise SystemExit(f"sglang-april: {refusal.sentence()}")


def _is_unset(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict | tuple) and not value)
