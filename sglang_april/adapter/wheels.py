"""The sources of SGLang releases, unpacked from their wheels: nothing is installed, built or imported."""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sglang_april.adapter.source_tree import digest_of_file

FOLDER = Path("out/wheels")
"""Where the sources of wheels are kept, below the working directory."""
_RELEASE = re.compile(r"\d+(\.\w+)*")


class SourceError(RuntimeError):
    """A source cannot be read. The message is the reason, in one sentence."""


class DownloadError(SourceError):
    """The package index has no such wheel, or cannot be reached."""


def source_of(release: str, folder: Path = FOLDER) -> Path:
    """The folder that contains the package `sglang` of a release, of a wheel, or of an unpacked tree.

    Args:
        release: a version, which is downloaded unless `folder` has it; the path of a wheel; or a folder with `sglang/`.
        folder: where the sources of wheels are kept.

    Raises:
        SourceError: there is no such source.
        DownloadError: the wheel cannot be downloaded.
    """
    path = Path(release)
    if path.is_dir():
        if not (path / "sglang" / "__init__.py").is_file():
            raise SourceError(f"the folder {path} has no package sglang; name the folder that contains it")
        return path.resolve()
    if path.suffix == ".whl":
        return _unpacked(path, folder / f"{path.stem}-{digest_of_file(path)[:12]}")
    if not _RELEASE.fullmatch(release):
        raise SourceError(f"{release} is neither a version such as 0.5.17, nor a wheel, nor a folder")
    target = folder / f"sglang-{release}"
    if target.is_dir():
        return target.resolve()
    with tempfile.TemporaryDirectory() as download:
        return _unpacked(_download(release, Path(download)), target)


def _download(release: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    pip += ["--retries", "1", "--timeout", "30"]
    done = subprocess.run(
        [*pip, "--dest", str(folder), f"sglang=={release}"], capture_output=True, text=True, check=False
    )
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else done.stderr.strip()
        raise DownloadError(f"the wheel of SGLang {release} cannot be downloaded: {reason[:300]}")
    return wheel


def _unpacked(wheel: Path, target: Path) -> Path:
    """The Python files of the package `sglang` in a wheel."""
    if not wheel.is_file():
        raise SourceError(f"there is no wheel {wheel}")
    if target.is_dir():
        return target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as partial:
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith("sglang/") and n.endswith(".py")]
                archive.extractall(Path(partial) / "tree", names)
        except zipfile.BadZipFile as error:
            raise SourceError(f"{wheel} is not a wheel ({error})") from error
        if "sglang/__init__.py" not in names:
            raise SourceError(f"the wheel {wheel} has no package sglang")
        try:
            (Path(partial) / "tree").rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    return target.resolve()
