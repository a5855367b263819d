"""How a YAML file and flags become a configuration."""

import argparse
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from trainer_bridge.config import Config, ConfigError


def field_types() -> dict[str, Any]:
    """Each field's type, without its bounds."""
    return get_type_hints(Config)


def parser() -> argparse.ArgumentParser:
    """One flag per field, spelt with dashes or underscores; what is not given stays with the file or the default."""
    made = argparse.ArgumentParser(
        prog="april-train",
        description="RL with Megatron-core as trainer and SGLang with sglang-april as engine.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    made.add_argument("--config", type=Path, help="YAML file with fields by name")
    made.add_argument("--dry-run", action="store_true", help="check everything that needs no engine, and end")
    defaults = {field.name: field for field in msgspec.structs.fields(Config)}
    for name, kind in field_types().items():
        names = list(dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"]))
        origin, inner = get_origin(kind), get_args(kind)
        field = defaults[name]
        default = "required" if field.required else field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory()
        shown = f"default: {default}"
        if kind is bool:
            made.add_argument(*names, action=argparse.BooleanOptionalAction, help=shown)
        elif origin is list or list[str] in inner:
            made.add_argument(*names, nargs="+", action="extend", help=shown)
        elif origin is Literal:
            made.add_argument(*names, choices=inner, help=shown)
        else:
            made.add_argument(*names, metavar="VALUE", help=shown)
    return made


def load(path: Path | None, flags: dict[str, Any]) -> Config:
    """The configuration of a file and of flags over it; raises ConfigError with the field's name."""
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            fields = yaml.safe_load(path.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: must hold fields by name")
    try:
        given = {name: _from_text(name, value) for name, value in flags.items()}
        return msgspec.convert(fields | given, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("`", "")) from error


def _from_text(name: str, value: Any) -> Any:
    """A flag's text as the field's type."""
    kind = field_types()[name]
    if get_origin(kind) is dict and isinstance(value, str):
        return yaml.safe_load(value)
    if value in ("none", "null") and type(None) in get_args(kind):
        return None
    return msgspec.convert(value, kind, strict=False)
