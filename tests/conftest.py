"""The order of tests over several workers (`make test`), and the report of reruns and guards.

The tests of a file stay together, so that its fixtures are made once.
"""

import importlib.util
import os
from pathlib import Path

import pytest

LIVE = Path(__file__).parent / "integration"
MODELS = {"falcon_h1", "glm4", "llama", "qwen2", "qwen3"}
"""SGLang's files of the models that tests use. Every scheduler imports the others too, in 4 s, unless excluded."""


def pytest_configure() -> None:
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None
    assert sglang.origin is not None
    files = {path.stem for path in (Path(sglang.origin).parent / "srt" / "models").glob("*.py")}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(files - MODELS))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin first, so that short ones fill both workers at the end (`--no-loadscope-reorder`).

    Runs after the hook of `integration/conftest.py`, which sets its own groups.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(item.config.rootpath))))
    items.sort(key=lambda item: (LIVE not in item.path.parents, item.get_closest_marker("slow") is None))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The guards and the tests that went red without them (test_guards.py); tests that took two tries.

    Here, because with several workers the reporting process imports no test and no `conftest.py` of a subfolder.
    """
    again = [f"{report.nodeid}: {_reason(report)}" for report in terminalreporter.stats.get("rerun", ())]
    if again:
        terminalreporter.section("live tests that were rerun")
        for line in again:
            terminalreporter.write_line(line)
    passed = [report for report in terminalreporter.stats.get("passed", ()) if report.when == "call"]
    shown = [(dict(report.user_properties).get("guard"), report.nodeid) for report in passed]
    if any(guard for guard, _ in shown):
        terminalreporter.section("guards, and the tests that fail without them")
        for guard, test in shown:
            if guard:
                terminalreporter.write_line(f"{guard:14} {test}")


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).splitlines()[0][:200]
