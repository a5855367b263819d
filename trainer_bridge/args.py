"""The command line of `april-train`: a configuration from a YAML file and flags."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from trainer_bridge.config import Config, ConfigError
from trainer_bridge.loss_settings import LossSettings

Field = tuple[msgspec.structs.FieldInfo, Any]
"""A field of `Config` or `LossSettings`, and its type without bounds."""


def config_fields() -> dict[str, Field]:
    """All fields by their names in YAML, in order; those of `LossSettings` in place of `Config.loss`."""
    return dict(_fields_of(Config))


def _fields_of(struct: type[msgspec.Struct]) -> Iterator[tuple[str, Field]]:
    types = get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        if field.type is LossSettings:
            yield from _fields_of(LossSettings)
        else:
            yield field.encode_name, (field, types[field.name])


def config_parser() -> argparse.ArgumentParser:
    """A parser with one flag per field, spelled with dashes or underscores. Flags that are absent are left out."""
    command = argparse.ArgumentParser(
        prog="april-train",
        description="RL with Megatron-core as trainer and SGLang with sglang-april as engine.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    command.add_argument("--config", type=Path, help="YAML file with fields by name")
    command.add_argument("--dry-run", action="store_true", help="check everything that needs no engine, then exit")
    for name, (field, kind) in config_fields().items():
        names = list(dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"]))
        origin, inner = get_origin(kind), get_args(kind)
        default = "required" if field.required else field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory()
        text = f"default: {default}"
        if kind is bool:
            command.add_argument(*names, action=argparse.BooleanOptionalAction, help=text)
        elif origin is list or list[str] in inner:
            command.add_argument(*names, nargs="+", action="extend", help=text)
        elif origin is Literal:
            command.add_argument(*names, choices=inner, help=text)
        else:
            command.add_argument(*names, metavar="VALUE", help=text)
    return command


def load(path: Path | None, flags: dict[str, Any]) -> Config:
    """The configuration in a YAML file, overridden by flags. Raises: ConfigError: with the name of the field."""
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            fields = yaml.safe_load(path.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: must contain fields by name")
    kinds = {name: kind for name, (_, kind) in config_fields().items()}
    try:
        return Config.from_fields(fields | {name: _from_text(kinds[name], value) for name, value in flags.items()})
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError):  # raised by LossSettings itself
            raise ConfigError(str(error.__cause__)) from error
        raise ConfigError(str(error).replace("`", "")) from error


def _from_text(kind: Any, value: Any) -> Any:
    """The text of a flag as a value of the field's type."""
    if get_origin(kind) is dict and isinstance(value, str):
        return yaml.safe_load(value)
    if value in ("none", "null") and type(None) in get_args(kind):
        return None
    return msgspec.convert(value, kind, strict=False)
