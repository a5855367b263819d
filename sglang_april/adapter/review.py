"""Review an SGLang source against what the adapter relies on: a release by its wheel alone, or a patched tree.

    python -m sglang_april.adapter.review 0.5.18             compare a release with the nearest reviewed one
    python -m sglang_april.adapter.review 0.5.18 --accept    write its manifest, once every change was read
    python -m sglang_april.adapter.review                    check all manifests against their sources

Nothing is installed or imported: symbols, arguments, environment variables and KV pools are read from the source text.
The exit status is 1 if something is left to review.
"""

import argparse
import difflib
import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_april.adapter import preflight, source_options, source_tree, versions
from sglang_april.adapter.refusals import rule_for
from sglang_april.adapter.versions import Manifest
from sglang_april.adapter.wheels import FOLDER, SourceError, source_of

UPSTREAM = "https://github.com/sgl-project/sglang/blob/v{}/python/"


@dataclass(frozen=True)
class Change:
    """One symbol that differs from the reviewed one."""

    path: str
    what: str
    """`gone`, `new in the adapter`, or the aspects that changed."""
    hooks: tuple[str, ...]
    """The hooks on it, each as kind, handler and reason."""
    diff: str = ""


@dataclass(frozen=True)
class Review:
    """A source compared with a reviewed one."""

    name: str
    base: str
    unchanged: int
    changes: tuple[Change, ...]
    options: tuple[str, ...]
    """Sentences about arguments, environment variables and pools that no list contains."""
    defaults: tuple[str, ...]
    """Sentences about changed defaults of arguments and environment variables."""

    def gone(self) -> list[str]:
        """Symbols in use that this source does not have."""
        return [change.path for change in self.changes if change.what == "gone"]

    def complete(self) -> bool:
        """Whether nothing is left to review."""
        return not self.changes and not self.options


def review(name: str, root: Path, base: Manifest, base_root: Path | None, shape: str) -> Review:
    """Compare the source at `root` with a manifest; `base_root`, the manifest's own source, adds diffs."""
    table = versions.load_hook_table(shape)
    paths = preflight.symbols_in_use(table)
    hooks = {path: tuple(f"{h.kind} {h.handler}: {h.why}" for h in table.HOOKS if path in h.paths) for path in paths}
    changes = []
    for path in paths:
        what = _change(base["symbols"].get(path), source_tree.describe(path, root))
        if what:
            changes.append(Change(path, what, hooks[path], _diff(path, base_root, root, base["sglang"], name)))
    defaults = tuple(_defaults(base_root, root)) if base_root is not None else ()
    return Review(name, base["sglang"], len(paths) - len(changes), tuple(changes), tuple(_unlisted(root)), defaults)


def build_manifest(name: str, shape: str, root: Path, paths: Iterable[str], upstream: str = "") -> Manifest:
    """Describe the symbols in the SGLang tree at `root`.

    Raises:
        SourceError: a symbol does not exist.
    """
    symbols: dict[str, Any] = {}
    for path in sorted(paths):
        entry = source_tree.describe(path, root)
        if entry is None:
            raise SourceError(f"{path} does not exist in SGLang {name}")
        symbols[path] = entry
    files = sorted({entry["file"] for entry in symbols.values()})
    return {
        "sglang": name,
        "shape": shape,
        "source": upstream or UPSTREAM.format(name),
        "files": {file: source_tree.digest_of_file(root / file) for file in files},
        "symbols": symbols,
    }


def nearest(name: str, reviewed: Iterable[str]) -> str:
    """The reviewed release before a release, or the first one after it."""
    ordered = sorted(reviewed, key=_order)
    before = [each for each in ordered if _order(each) <= _order(name)]
    return before[-1] if before else ordered[0]


def _order(name: str) -> list[tuple[int, str]]:
    """Sort key of a release: `0.5.15.post1` comes after `0.5.15` and before `0.5.16`."""
    parts = name.replace("+", ".").split(".")
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _change(reviewed: dict[str, Any] | None, current: dict[str, Any] | None) -> str:
    if current is None:
        return "gone"
    if reviewed is None:
        return "new in the adapter"
    return ", ".join(aspect for aspect in source_tree.ASPECTS if current[aspect] != reviewed[aspect])


def _diff(path: str, base_root: Path | None, root: Path, base: str, name: str) -> str:
    """A diff of the normalized text that the digests compare: without comments, docstrings and formatting."""
    if base_root is None or source_tree.find(path, root) is None:
        return ""
    old, new = (source_tree.text_of(path, each).splitlines() for each in (base_root, root))
    return "\n".join(difflib.unified_diff(old, new, base, name, lineterm=""))


def _unlisted(root: Path) -> Iterator[str]:
    """Sentences about options and pools that no list of the adapter names; the start refuses them if used."""
    rules = importlib.import_module(f"{versions.CORE}.arguments").ARGUMENTS
    set_by_environment = importlib.import_module(f"{versions.CORE}.environment").ENVIRONMENT
    pools = importlib.import_module(f"{versions.CORE}.reviewed_pools")
    arguments, variables = source_options.arguments(root), source_options.variables(root)
    if not arguments or not variables:
        yield "the arguments or environment variables cannot be read from this source"
    for name, value in arguments.items():
        if rule_for(name, rules) is None:
            yield f"argument {name} (default {value or 'none'})"
    for name, value in variables.items():
        if rule_for(name, set_by_environment) is None:
            yield f"environment variable {name} ({value})"
    reviewed = {*pools.SUPPORTED_POOLS, *pools.REFUSED_POOLS}
    yield from (f"KV pool {name}" for name in sorted(source_options.pools(root) - reviewed))


def _defaults(base_root: Path, root: Path) -> Iterator[str]:
    for read in (source_options.arguments, source_options.variables):
        old, new = read(base_root), read(root)
        yield from (f"{name}: {old[name]} → {new[name]}" for name in new if name in old and new[name] != old[name])


def _report(found: Review, *, diffs: bool) -> Iterator[str]:
    gone, hooks = found.gone(), {hook for change in found.changes for hook in change.hooks}
    changed = len(found.changes) - len(gone)
    yield (
        f"SGLang {found.name} compared with the reviewed {found.base}: {found.unchanged} symbols unchanged, "
        f"{changed} changed or new, {len(gone)} gone; {len(hooks)} hooks concerned"
    )
    for change in found.changes:
        yield f"\n{change.path}: {change.what}"
        yield from (f"  hook {hook}" for hook in change.hooks)
        if diffs and change.diff:
            yield change.diff
    if found.options:
        yield "\nin no list of the adapter, so refused at start if set or used:"
        yield from (f"  {sentence}" for sentence in found.options)
    if found.defaults:
        yield "\nother defaults:"
        yield from (f"  {sentence}" for sentence in found.defaults)


def main(argv: list[str] | None = None) -> int:
    """Report what changed; write manifests with --accept."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_april.adapter.review",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "releases",
        nargs="*",
        metavar="RELEASE",
        help="a version, the path of a wheel, or a folder that contains sglang/ (default: all reviewed releases)",
    )
    parser.add_argument("--base", help="the reviewed source to compare with (default: the nearest release, or itself)")
    parser.add_argument("--name", help="name of a patched source, such as 0.5.17+mine")
    parser.add_argument("--shape", help="module in adapter/shapes for this source (default: that of the base)")
    parser.add_argument("--upstream", default="", help="URL of the reviewed tree (default: SGLang's tag)")
    parser.add_argument("--wheels", type=Path, default=FOLDER, help="folder for the sources of wheels (%(default)s)")
    parser.add_argument("--summary", action="store_true", help="print no diffs")
    parser.add_argument("--accept", action="store_true", help="write the manifest, after you have read every change")
    options = parser.parse_args(argv)
    try:
        releases = options.releases or [name for name in versions.manifests() if "+" not in name]
        left = [release for release in releases if not _run(release, options)]
    except (SourceError, versions.PreflightError) as error:
        raise SystemExit(f"sglang-april: {error}") from error
    return 1 if left else 0


def _run(release: str, options: argparse.Namespace) -> bool:
    """Review one source; whether nothing is left to review."""
    root = source_of(release, options.wheels)
    name = options.name or _name_of(release)
    known = versions.manifests()
    base = known.get(options.base or (name if name in known else nearest(name, known)))
    if base is None:
        raise SourceError(f"{options.base} was not reviewed, only {', '.join(known)}")
    shape = options.shape or base["shape"]
    base_root = None if base["sglang"] == name else _source_of_base(base, options.wheels)
    found = review(name, root, base, base_root, shape)
    print("\n".join(_report(found, diffs=not options.summary)))  # noqa: T201
    if not options.accept:
        return found.complete()
    if gone := found.gone():
        raise SourceError(f"no manifest was written: SGLang {name} has no {gone[0]}, so it needs another shape")
    paths = preflight.symbols_in_use(versions.load_hook_table(shape))
    manifest = build_manifest(name, shape, root, paths, options.upstream)
    file = versions.FINGERPRINTS / f"{name}.json"
    file.write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"\nwrote {file}")  # noqa: T201
    return not found.options


def _name_of(release: str) -> str:
    path = Path(release)
    if path.suffix == ".whl":
        return path.name.split("-")[1] if path.name.count("-") > 1 else path.stem
    if path.is_dir():
        raise SourceError(f"give the source in {release} a name with --name")
    return release


def _source_of_base(base: Manifest, wheels: Path) -> Path:
    """The installed SGLang if it is the base, or else the base's wheel."""
    root = versions.sglang_root()
    return source_of(base["sglang"], wheels) if versions.differing_files(base, root) else root


if __name__ == "__main__":
    raise SystemExit(main())
