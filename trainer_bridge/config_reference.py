"""Descriptions of all configuration fields, for `april-train --help` and docs/configuration.md, and the page of the
server's flags, docs/server-flags.md.

    python -m trainer_bridge.config_reference           # write both pages
    python -m trainer_bridge.config_reference --check   # fail if a page differs from the code

A field's description is the docstring below it in the source of `Config` or `LossSettings`, and its section is the
comment line above its group of fields.
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from sglang_april.config import FLAGS, AprilConfig
from trainer_bridge.config import Config
from trainer_bridge.loss_settings import LossSettings

DOCS = Path(__file__).resolve().parents[1] / "docs"
INTRODUCTION = """# Configuration of a training run

`april-train --config FILE` reads these fields from YAML; a flag overrides one: `--rollout-batch-size 32` is
`rollout_batch_size: 32`. `april-train --help` prints the same descriptions, and `--dry-run` checks a configuration
without an engine. Names follow slime's where slime has the setting. How a run works: [training.md](training.md).

This page is generated: `python -m trainer_bridge.config_reference`.
"""
SERVER_FLAGS = """# Flags of the server

`python -m sglang_april.launch_server` and `sglang serve` take these flags beside SGLang's own. A server that another
program starts reads them from the environment variable `SGLANG_APRIL`, a JSON object whose keys are the flags without
`--april-`, with underscores: `--april-max-staleness 2 --april-audit 4 --april-audit-strict` is
`{"max_staleness": 2, "audit": 4, "audit_strict": true}`. A flag on the command line overrides its key.
[limits.md](limits.md#refused-at-start) lists the flags of SGLang that are refused.

This page is generated: `python -m trainer_bridge.config_reference`.

## Several servers on one machine

All servers of a job read the same `SGLANG_APRIL`. Two of its settings assume that a machine has one server:

- **Host memory.** By default a server takes a quarter of its machine's memory for KV. Set `servers_per_machine` to the
  number of servers on each machine: `{"quota": 32, "servers_per_machine": 8}`. `april-train` sets it for the servers
  that it starts.
- **Files.** `journal` and `disk_dir` belong to one server; a second one refuses to start, because "it is in use by
  another server". Use them with one server per machine and a path on its own disk, or start the servers yourself, each
  with paths of its own.

## All flags

| flag | values | meaning |
| --- | --- | --- |
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


def configuration_page() -> str:
    """The contents of docs/configuration.md."""
    text, section = INTRODUCTION, None
    for field in references():
        if field.section != section:
            section = field.section
            text += f"\n## {section}\n\n| field | values | default | |\n| --- | --- | --- | --- |\n"
        text += f"| `{field.name}` | {field.values} | `{field.default}` | {field.description} |\n"
    return text


def server_flags_page() -> str:
    """The contents of docs/server-flags.md."""
    lines = []
    for flag in FLAGS:
        values = f"`{flag.metavar}`" if flag.metavar else "–"
        meaning = flag.described(getattr(AprilConfig, flag.field))
        lines.append(f"| `{flag.option}` | {values} | {meaning[0].upper()}{meaning[1:]}. |\n")
    return SERVER_FLAGS + "".join(lines)


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "configuration.md": configuration_page,
    DOCS / "server-flags.md": server_flags_page,
}


def main() -> int:
    """Write the pages, or compare them. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md and docs/server-flags.md.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit status 1 if different")
    check, status = parser.parse_args().check, 0
    for path, contents in PAGES.items():
        if not check:
            path.write_text(contents())
        elif not path.exists() or path.read_text() != contents():
            print(f"{path.name} differs from the code: python -m trainer_bridge.config_reference writes it")  # noqa: T201
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
