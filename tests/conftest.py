"""With several workers (`make test`), the tests of a file stay together: its fixtures are made once for all of them."""

from pathlib import Path

import pytest

LIVE = Path(__file__).parent / "integration"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin first, so that short ones fill both workers at the end (`--no-loadscope-reorder`).

    Runs after the hook of `integration/conftest.py`, which sets its own groups.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(item.config.rootpath))))
    items.sort(key=lambda item: (LIVE not in item.path.parents, item.get_closest_marker("slow") is None))
