"""Which SGLang sources are supported, and the shape of the installed one.

A version string does not identify the installed source: images carry patched releases, or report another version. Each
reviewed source therefore has a manifest, `fingerprints/<release>.json`, with the SHA-256 of every file that the adapter
relies on and a digest of every symbol that it hooks or calls. The installed SGLang is the one whose files a manifest
lists or, where files differ elsewhere, the one whose symbols do not. All are served by one package, `CORE`, with the
handlers and two modules:

    hook_table  HOOKS: tuple[Hook, ...]            every function that is hooked
                DEPENDS_ON: tuple[str, ...]        dotted paths of what is called without being hooked
    start       ENVIRONMENT: Mapping[str, str]     variables that SGLang's processes need
                applying_hooks()                   a context in which SGLang applies the hooks

A release that changes nothing the handlers rely on needs only a manifest. Where interfaces differ, the handlers call
the release's shape, `SHAPE` of a module in `SHAPES` that its manifest names (`shapes/interface.py`).
"""

import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from sglang_april.adapter import source_tree
from sglang_april.adapter.hook import Hook
from sglang_april.adapter.shapes.interface import Shape

FINGERPRINTS = Path(__file__).parent / "fingerprints"

Manifest = dict[str, Any]
"""`sglang`: name of the reviewed source, a release or a patched one; `shape`: its module in `shapes`; `source`: URL of
the reviewed tree; `files`: path → SHA-256; `symbols`: dotted path → file, line, kind, signature and digest of the
body."""


class PreflightError(RuntimeError):
    """The server must not start. The message is the reason, in one sentence."""


CORE = "sglang_april.adapter.core"
SHAPES = "sglang_april.adapter.shapes"


class HookTable(NamedTuple):
    """What the adapter hooks and calls in the releases of one shape."""

    HOOKS: tuple[Hook, ...]
    DEPENDS_ON: tuple[str, ...]


class Start(Protocol):
    """The interface of `<core>.start`."""

    ENVIRONMENT: Mapping[str, str]

    def applying_hooks(self) -> AbstractContextManager[None]: ...


def version_string() -> str:
    """The version that the installed SGLang reports. It does not select the manifest."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "without a version"


def sglang_root() -> Path:
    """The folder that contains the installed package `sglang`; importing it would be slow.

    Raises:
        PreflightError: SGLang is not installed.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PreflightError("SGLang is not installed")
    return Path(spec.submodule_search_locations[0]).parent


def manifests() -> dict[str, Manifest]:
    """All manifests by the name of their source."""
    return _read(FINGERPRINTS)


def installed() -> Manifest:
    """The manifest of the installed SGLang.

    Raises:
        PreflightError: its source was not reviewed; the message names what differs from the nearest reviewed one.
    """
    return select(sglang_root(), FINGERPRINTS)


@cache
def select(root: Path, folder: Path) -> Manifest:
    """The manifest in `folder` that describes the SGLang source at `root`.

    Raises:
        PreflightError: no manifest describes it.
    """
    known = _read(folder)
    for manifest in known.values():
        if not differing_files(manifest, root):
            return manifest
    found = {name: differences(manifest, root) for name, manifest in known.items()}
    same = next((name for name, differs in found.items() if not differs), None)
    if same is not None:
        return known[same]
    claimed = version_string()
    nearest = min(found, key=lambda name: (len(found[name]), name != claimed))
    first, more = found[nearest][0], len(found[nearest]) - 1
    rest = f" (and {more} more)" if more else ""
    raise PreflightError(
        f"this SGLang {claimed} is not supported, only the reviewed sources of {', '.join(known)}: "
        f"compared with {nearest}, {first}{rest}"
    )


def source_digest() -> str:
    """Digest of the files of the installed SGLang that the adapter relies on."""
    root, digest = sglang_root(), hashlib.blake2b(digest_size=8)
    for file in installed()["files"]:
        digest.update(f"{file} {source_tree.digest_of_file(root / file)}\n".encode())
    return digest.hexdigest()


def differing_files(manifest: Manifest, root: Path) -> list[str]:
    """Files that differ from the reviewed ones. Equal files need no parsing, so this takes milliseconds."""
    return [file for file, digest in manifest["files"].items() if source_tree.digest_of_file(root / file) != digest]


def differences(manifest: Manifest, root: Path) -> list[str]:
    """What differs from a reviewed source: one clause for each symbol in a file that is not the reviewed one."""
    files = differing_files(manifest, root)
    found = []
    for path, reviewed in manifest["symbols"].items():
        if reviewed["file"] not in files:
            continue
        current = source_tree.describe(path, root)
        changed = [aspect for aspect in source_tree.ASPECTS if current and current[aspect] != reviewed[aspect]]
        if current is None or changed:
            found.append(f"the {changed[0]} of {path} has changed" if changed else f"{path} does not exist")
    return found


def hook_table() -> HookTable:
    """The hook table for the installed SGLang."""
    return load_hook_table(installed()["shape"])


def load_hook_table(shape: str) -> HookTable:
    """The hook table for the releases of a shape."""
    table, differs = importlib.import_module(f"{CORE}.hook_table"), load_shape(shape)
    hooks = [dataclasses.replace(hook, paths=_targets(hook.paths, differs)) for hook in table.HOOKS]
    return HookTable(
        (*(hook for hook in hooks if hook.paths), *differs.HOOKS),
        (*_targets(table.DEPENDS_ON, differs), *differs.DEPENDS_ON),
    )


def _targets(paths: Iterable[str], shape: Shape) -> tuple[str, ...]:
    """The symbols, each where it is in the releases of a shape."""
    return tuple(target for path in paths for target in shape.TARGETS.get(path, (path,)))


def load_shape(name: str) -> Shape:
    """The shape of this name.

    Raises:
        PreflightError: no shape has this name.
    """
    try:
        return cast(Shape, importlib.import_module(f"{SHAPES}.{name}").SHAPE)
    except ModuleNotFoundError as error:
        raise PreflightError(f"there is no shape {name} in {SHAPES}") from error


def start() -> Start:
    """What the entry point needs for the installed SGLang."""
    return cast(Start, importlib.import_module(f"{CORE}.start"))


def upstream_link(manifest: Manifest, path: str) -> str:
    """URL of the reviewed source line of a symbol."""
    symbol = manifest["symbols"][path]
    return f"{manifest['source']}{symbol['file']}#L{symbol['line']}"


@cache
def _read(folder: Path) -> dict[str, Manifest]:
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return {manifest["sglang"]: manifest for manifest in found}
