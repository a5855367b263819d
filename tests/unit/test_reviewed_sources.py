"""Every reviewed release against its own source, unpacked from its wheel; skipped where no wheel can be downloaded."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from sglang_april.adapter import source_options, versions
from sglang_april.adapter.core.arguments import ARGUMENTS
from sglang_april.adapter.core.environment import ENVIRONMENT
from sglang_april.adapter.core.reviewed_pools import REFUSED_POOLS, SUPPORTED_POOLS
from sglang_april.adapter.review import review
from sglang_april.adapter.wheels import DownloadError, source_of

FOLDER = Path(__file__).parents[2] / "out" / "wheels"
RELEASES = [name for name in versions.manifests() if "+" not in name]


def source(release: str) -> Path:
    """The source of a release: the installed one, or that of its wheel."""
    found = _found(release)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@cache
def _found(release: str) -> Path | str:
    """The source, or the reason why it is not available; determined once."""
    if release == versions.installed()["sglang"]:
        return versions.sglang_root()
    try:
        return source_of(release, FOLDER)
    except DownloadError as error:
        return str(error)


@pytest.mark.parametrize("release", RELEASES)
def test_release_has_what_was_reviewed_and_nothing_else(release: str) -> None:
    manifest = versions.manifests()[release]
    root = source(release)
    assert versions.differing_files(manifest, root) == []
    found = review(release, root, manifest, None, manifest["shape"])
    assert found.changes == ()
    assert found.options == ()


@pytest.mark.parametrize("name", versions.manifests())
def test_the_barrier_of_gathers_was_reviewed(name: str) -> None:
    """`proximal._entry_barrier` sets an attribute that `__init__` makes and `__call__` reads."""
    gatherer = "sglang.srt.distributed.device_communicators.triton_symm_mem_ag.MultimemAllGatherer"
    assert {f"{gatherer}.__init__", f"{gatherer}.__call__"} <= set(versions.manifests()[name]["symbols"])


@pytest.mark.parametrize("release", RELEASES)
def test_release_is_recognized_by_its_source(release: str) -> None:
    assert versions.select(source(release), versions.FINGERPRINTS)["sglang"] == release


@pytest.mark.skipif("SLIME_PATH" not in os.environ, reason="needs a checkout of slime in SLIME_PATH")
def test_release_with_slimes_patches_is_recognized_by_its_source(tmp_path: Path) -> None:
    """Its version string is that of the release."""
    patches = Path(os.environ["SLIME_PATH"]) / "docker" / "patch" / "v0.5.15.post1"
    shutil.copytree(source("0.5.15.post1") / "sglang", tmp_path / "python" / "sglang")
    for patch in (patches / "sglang.patch", *sorted(patches.glob("sglang-*.patch"))):
        subprocess.run(["git", "apply", "--include=python/sglang/*.py", patch.resolve()], cwd=tmp_path, check=True)
    assert versions.select(tmp_path / "python", versions.FINGERPRINTS)["sglang"] == "0.5.15.post1+slime"


def test_no_list_names_what_no_release_has() -> None:
    roots = [source(release) for release in RELEASES]
    arguments = {name for root in roots for name in source_options.arguments(root)}
    variables = {name for root in roots for name in source_options.variables(root)}
    assert {name for rule in ARGUMENTS for name in rule.names} <= arguments
    assert {name for rule in ENVIRONMENT for name in rule.names if "*" not in name} <= variables
    assert set(REFUSED_POOLS) | set(SUPPORTED_POOLS) == {name for root in roots for name in source_options.pools(root)}
