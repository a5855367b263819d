"""Descriptions of all configuration fields, for `april-train --help` and docs/configuration.md.

    python -m trainer_bridge.config_reference           # write docs/configuration.md
    python -m trainer_bridge.config_reference --check   # fail if the page differs from the code

A field's description is the docstring below it in the source of `Config` or `LossSettings`, and its section is the
comment line above its group of fields.
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from trainer_bridge.config import Config
from trainer_bridge.loss_settings import LossSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
INTRODUCTION = """# Configuration of a training run

`april-train --config FILE` reads these fields from YAML; a flag overrides one: `--rollout-batch-size 32` is
`rollout_batch_size: 32`. `april-train --help` prints the same descriptions, and `--dry-run` checks a configuration
without an engine. Names follow slime's where slime has the setting. How a run works: [training.md](training.md).

This page is generated: `python -m trainer_bridge.config_reference`.
"""


@dataclass(frozen=True, slots=True)
class FieldReference:
    """A field of the configuration as users see it."""

    name: str
    section: str
    description: str
    info: msgspec.structs.FieldInfo
    kind: Any
    """Its type without bounds."""

    @property
    def default(self) -> str:
        """The default as in YAML; `required` without one."""
        if self.info.required:
            return "required"
        value = self.info.default
        if value is msgspec.NODEFAULT:
            value = self.info.default_factory()
        if value is None or isinstance(value, bool):
            return {None: "none", True: "true", False: "false"}[value]
        return repr(value) if isinstance(value, list | dict) else str(value)

    @property
    def values(self) -> str:
        """The accepted values, in words."""
        return _type_text(self.kind)


def references() -> list[FieldReference]:
    """All fields in the order of `Config`, those of `LossSettings` in place of `Config.loss`."""
    return list(_references(Config, ""))


def _references(struct: type[msgspec.Struct], section: str) -> Iterator[FieldReference]:
    types, described = get_type_hints(struct), _described(struct)
    for info in msgspec.structs.fields(struct):
        heading, text = described[info.name]
        if info.type is LossSettings:
            yield from _references(LossSettings, heading)
        else:
            yield FieldReference(info.encode_name, heading or section, text, info, types[info.name])


def _described(struct: type) -> dict[str, tuple[str, str]]:
    """Section and description of each field, from the source of its class."""
    source = inspect.getsource(struct)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    lines, body = source.splitlines(), definition.body
    headings = {number: line.strip()[2:] for number, line in enumerate(lines, 1) if line.startswith("    # ")}
    described: dict[str, tuple[str, str]] = {}
    for field, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above = [number for number in headings if number < field.lineno]
            text = ast.literal_eval(following.value) if isinstance(following, ast.Expr) else ""
            described[field.target.id] = headings[max(above)] if above else "", " ".join(text.split())
    return described


def _type_text(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is list:
        return f"list of {_type_text(inner[0])}"
    if origin is dict:
        return "mapping"
    if origin is Union or (inner and type(None) in inner):
        return " or ".join(_type_text(one) for one in inner if one is not type(None))
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}.get(kind, str(kind))


def page() -> str:
    """The contents of docs/configuration.md."""
    text, section = INTRODUCTION, None
    for field in references():
        if field.section != section:
            section = field.section
            text += f"\n## {section}\n\n| field | values | default | |\n| --- | --- | --- | --- |\n"
        text += f"| `{field.name}` | {field.values} | `{field.default}` | {field.description} |\n"
    return text


def main() -> int:
    """Write the page, or compare it. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit status 1 if different")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print(f"{PAGE.name} differs from the code: python -m trainer_bridge.config_reference writes it")  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
