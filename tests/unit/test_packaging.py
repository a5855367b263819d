"""The wheel: three packages, two entry points, and nothing that hides Hugging Face's package `kernels`."""

import ast
import re
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sglang_april.adapter import versions

ROOT = Path(__file__).parents[2]


def test_kernels_is_not_a_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "kernels").glob("*.py"))


@pytest.mark.parametrize("cwd", [ROOT, Path("/")])
def test_kernels_imports_hugging_faces_package(cwd: Path) -> None:
    code = "import kernels; print(kernels.__file__); kernels.get_kernel"
    found = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    assert "site-packages" in found.stdout


def test_wheel_contains_exactly_three_packages(tmp_path: Path) -> None:
    # Built from a source archive, so that no build folder is left in the tree.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"sglang_april", "april_kernels", "trainer_bridge"}
    assert any(name.startswith("sglang_april/adapter/fingerprints/") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("sglang.srt.plugins", "april", "sglang_april.plugin:register"),
        ("sglang.srt.platforms", "april_cpu", "sglang_april.cpu:activate"),
    ],
)
def test_entry_points(group: str, name: str, value: str) -> None:
    (entry,) = [entry for entry in entry_points(group=group) if entry.name == name]
    assert entry.value == value
    assert callable(entry.load())


THIRD_PARTY = {"httpx", "msgspec", "numba", "llvmlite", "numpy", "prometheus_client"}
"""What the base installation brings besides SGLang and what SGLang itself brings."""
FRAMEWORKS = {"verl", "areal"}
"""Imported by their adapters alone, which run inside of them."""
OF_SGLANG = {"sglang", "torch", "triton", "fastapi", "starlette", "uvicorn", "transformers", "zmq", "psutil"}


@pytest.mark.parametrize("package", ["sglang_april", "kernels/april_kernels"])
def test_base_dependencies_cover_the_imports(package: str) -> None:
    """The engine side imports nothing that only an extra installs (matplotlib, rich, scipy, …)."""
    names = set()
    for file in (ROOT / package).rglob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
        names |= found - FRAMEWORKS if "integrations" in file.parts else found
    assert names <= set(sys.stdlib_module_names) | THIRD_PARTY | OF_SGLANG | {"sglang_april", "april_kernels"}


def test_inactive_plugin_imports_neither_sglang_nor_torch() -> None:
    """An installed plugin is loaded in every process of every SGLang server, also when it is not active."""
    code = (
        "import sys, sglang_april.plugin as p, sglang_april.config, sglang_april.cpu as f;"
        "p.register(); assert f.activate() is None;"
        "assert not {'sglang', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={"PATH": ""}, check=True)


def test_dependency_admits_reviewed_releases_of_sglang_only() -> None:
    """A release is in the range once its tests were seen to pass, and `make` installs one of them."""
    (line,) = re.findall(r'"(sglang>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    (default,) = re.findall(r"^SGLANG \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    reviewed = sorted(name for name in versions.manifests() if "+" not in name)
    releases = {*reviewed, *(f"0.5.{number}" for number in range(10, 40))}
    assert sorted(release for release in releases if Requirement(line).specifier.contains(release)) == reviewed
    assert default in reviewed
    page = (ROOT / "docs" / "sglang-versions.md").read_text()
    assert [release for release in reviewed if f"| {release} |" not in page] == []
