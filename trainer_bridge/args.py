"""The command line of `april-train`: a configuration from a YAML file and flags."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec
import yaml

from sglang_april.flag_values import suggestion
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.config_reference import FieldReference, references


class _Parser(argparse.ArgumentParser):
    """Accepts flags with underscores, as slime spells them, and names the closest flag to an unknown one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(argument) for argument in given], namespace)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            message += suggestion(unknown[0].partition("=")[0], list(self._option_string_actions))
        super().error(message)


def config_parser() -> argparse.ArgumentParser:
    """A parser with one flag per field, spelled with dashes or underscores. Flags that are absent are left out."""
    command = _Parser(
        prog="april-train",
        usage="%(prog)s [--config FILE] [--dry-run] [--FIELD VALUE ...]",
        description="RL with Megatron-core as trainer and SGLang with sglang-april as engine. "
        "`april-train report RUN_DIR` writes an HTML page about a run.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    command.add_argument("--config", type=Path, help="YAML file with fields by name; flags override it")
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration, model, data and reward or agent, estimate memory, then exit",
    )
    groups: dict[str, Any] = {}
    for field in references():
        if field.section not in groups:
            groups[field.section] = command.add_argument_group(field.section)
        _add_flag(groups[field.section], field)
    return command


def _add_flag(group: Any, field: FieldReference) -> None:
    name = f"--{field.name.replace('_', '-')}"
    origin, inner = get_origin(field.kind), get_args(field.kind)
    text = f"{field.description.removesuffix('.')} (default: {field.default})".replace("%", "%%")
    if field.kind is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=text)
    elif origin is list or list[str] in inner:
        group.add_argument(name, nargs="+", action="extend", metavar="VALUE", help=text)
    elif origin is Literal:
        group.add_argument(name, choices=inner, help=text)
    else:
        group.add_argument(name, metavar="VALUE", help=text)


def load(path: Path | None, flags: dict[str, Any]) -> Config:
    """The configuration in a YAML file, overridden by flags. Raises: ConfigError: with the name of the field."""
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            fields = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise ConfigError(f"--config {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: must contain fields by name")
    known = {field.name: field for field in references()}
    if unknown := [name for name in fields | flags if name not in known]:
        raise ConfigError(f"unknown field {unknown[0]}{suggestion(str(unknown[0]), list(known))}")
    converted = {name: _from_file(known[name], value) for name, value in fields.items()}
    converted |= {name: _from_flag(known[name], value) for name, value in flags.items()}
    try:
        return Config.from_fields(converted)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError):  # raised by LossSettings itself
            raise ConfigError(str(error.__cause__)) from error
        if missing := re.match(r"Object missing required field `(\w+)`", str(error)):
            flag = missing[1].replace("_", "-")
            raise ConfigError(f"{missing[1]}: is required, as a field of --config or as --{flag}") from error
        raise ConfigError(str(error).replace("`", "")) from error


def _from_file(field: FieldReference, value: Any) -> Any:
    """A value from YAML. Numbers may be text: YAML 1.1 reads `1e-6` as text, because it has no dot."""
    numeric = {int, float} & {field.kind, *get_args(field.kind)}
    return _convert(field, value, strict=not (numeric and isinstance(value, str)))


def _from_flag(field: FieldReference, value: Any) -> Any:
    """The text of a flag as a value of the field's type."""
    if get_origin(field.kind) is dict and isinstance(value, str):
        value = yaml.safe_load(value)
    if value in ("none", "null") and type(None) in get_args(field.kind):
        return None
    return _convert(field, value, strict=False)


def _convert(field: FieldReference, value: Any, *, strict: bool) -> Any:
    try:
        return msgspec.convert(value, field.info.type, strict=strict)
    except msgspec.ValidationError as error:
        expected = str(error).partition(", got")[0].replace("`", "").replace("Expected", "expected")
        if expected.startswith("Invalid"):
            expected = f"expected {field.values.replace('`', '')}"
        raise ConfigError(f"{field.name}: {expected}, got {value!r}") from error


def _dashed(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument
