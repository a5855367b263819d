"""The documentation site builds without a warning: every page is in its navigation, every link and anchor exists."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    made = {str(path.relative_to(tmp_path).with_suffix("")) for path in tmp_path.rglob("*.html")}
    assert {page.replace("README", "index") for page in pages} <= made
