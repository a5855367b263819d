"""Which SGLang releases are supported, and the adapter package that serves the installed one.

Each supported release has a reviewed manifest, `fingerprints/<version>.json`, which names its adapter package. A
release that changes nothing the adapter relies on needs only a manifest. One that does needs a package of its own, with
the handlers and two modules:

    hook_table  HOOKS: tuple[Hook, ...]            every function that is hooked
                DEPENDS_ON: tuple[str, ...]        dotted paths of what is called without being hooked
    start       ENVIRONMENT: Mapping[str, str]     variables that SGLang's processes need
                applying_hooks()                   a context in which SGLang applies the hooks

This module is the only place that selects a package.
"""

import importlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

from sglang_april.adapter.hook import Hook

FINGERPRINTS = Path(__file__).parent / "fingerprints"

Manifest = dict[str, Any]
"""`sglang`: version; `adapter`: package; `source`: URL of the reviewed tree; `files`: path → SHA-256;
`symbols`: dotted path → file, line, kind, signature and digest of the body."""


class PreflightError(RuntimeError):
    """Why this server must not start, in one sentence."""


class HookTable(Protocol):
    """The interface of `<adapter package>.hook_table`."""

    HOOKS: tuple[Hook, ...]
    DEPENDS_ON: tuple[str, ...]


class Start(Protocol):
    """The interface of `<adapter package>.start`."""

    ENVIRONMENT: Mapping[str, str]

    def applying_hooks(self) -> AbstractContextManager[None]: ...


def sglang_version() -> str:
    """The installed SGLang release, from its metadata: importing SGLang would be slow."""
    return importlib.metadata.version("sglang")


def sglang_root() -> Path:
    """The folder that contains the package `sglang`.

    Raises:
        PreflightError: SGLang is not installed.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PreflightError("SGLang is not installed")
    return Path(spec.submodule_search_locations[0]).parent


def supported_versions() -> list[str]:
    """Releases with a reviewed manifest."""
    return sorted(file.stem for file in FINGERPRINTS.glob("*.json"))


def reviewed_manifest(version: str) -> Manifest:
    """The manifest of a release.

    Raises:
        PreflightError: the release is not supported; the message lists those that are.
    """
    file = FINGERPRINTS / f"{version}.json"
    if not file.is_file():
        raise PreflightError(f"SGLang {version} is not supported, only {', '.join(supported_versions())}")
    manifest: Manifest = json.loads(file.read_text())
    return manifest


def adapter_package() -> str:
    """Dotted name of the adapter package for the installed SGLang."""
    return str(reviewed_manifest(sglang_version())["adapter"])


def hook_table() -> HookTable:
    """The hook table for the installed SGLang."""
    return load_hook_table(adapter_package())


def load_hook_table(package: str) -> HookTable:
    """The hook table of an adapter package."""
    return cast(HookTable, importlib.import_module(f"{package}.hook_table"))


def start() -> Start:
    """What the entry point needs for the installed SGLang."""
    return cast(Start, importlib.import_module(f"{adapter_package()}.start"))


def upstream_link(manifest: Manifest, path: str) -> str:
    """URL of the reviewed source line of a symbol."""
    symbol = manifest["symbols"][path]
    return f"{manifest['source']}{symbol['file']}#L{symbol['line']}"
