"""A flag, and the parsers of flag values from the command line or JSON.

Each parser raises ValueError; the message continues "--flag …".
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PREFIX = "--april-"
MAX_COUNT = 2**31 - 1
MAX_SECONDS = 86_400


class ConfigError(ValueError):
    """An invalid flag; the message is one sentence that names it."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message about the unknown `name`: the closest known name, or nothing."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


@dataclass(frozen=True)
class Flag:
    """A field of `AprilConfig`, its parser and its help text."""

    field: str
    parse: Callable[[Any], Any]
    metavar: str
    help: str
    switch: bool = False
    """The flag may be given without a value, which means `on`."""

    @property
    def option(self) -> str:
        """The flag as on the command line."""
        return PREFIX + self.field.replace("_", "-")

    def described(self, default: Any) -> str:
        """The help text, with the default of its field unless the text states it."""
        if "default" in self.help:
            return self.help
        return f"{self.help} (default: {_as_typed(default)})"

    @property
    def arity(self) -> dict[str, Any]:
        """Keyword arguments of `argparse` for the number of values."""
        return {"nargs": "?", "const": "on"} if self.switch else {}

    def read(self, value: Any) -> Any:
        """The parsed value.

        Raises:
            ConfigError: it names the flag.
        """
        try:
            return self.parse(value)
        except ValueError as error:
            raise ConfigError(f"{self.option} {error}, not {value!r}") from None


def setting(default: Any, parse: Callable[[Any], Any], metavar: str, text: str, *, switch: bool = False) -> Any:
    """A field of `AprilConfig` with its default, and the other fields of its `Flag`."""
    described = {"parse": parse, "metavar": metavar, "help": text, "switch": switch}
    return dataclasses.field(default=default, metadata=described)


def _as_typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def whole(low: int, high: int = MAX_COUNT) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if type(number) is not int or not low <= number <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return number

    return parse


def name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 256 or "\0" in value:
        raise ValueError("must be a name of 1 to 256 characters")
    return value


def gigabytes(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError("must be a number of gigabytes of at least 0")
    return number


def seconds(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= MAX_SECONDS:
        raise ValueError(f"must be a number of seconds above 0 and up to {MAX_SECONDS}")
    return number


def difference(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError("must be a number above 0")
    return number


def switch(value: Any) -> bool:
    if value not in (True, False, "on", "off"):
        raise ValueError("must be on or off")
    return value in (True, "on")


def directory(value: Any) -> str:
    if not isinstance(value, str) or not Path(value).is_dir() or not os.access(value, os.W_OK | os.X_OK):
        raise ValueError("must be a directory that exists and can be written")
    return str(Path(value).resolve())


def choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return str(value)

    return parse


def concurrency(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        return whole(1)(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def path(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be the path of a file")
    return str(Path(value).absolute())


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    return value
