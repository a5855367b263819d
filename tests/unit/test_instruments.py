"""Every function that a test instrument replaces exists: SGLang skips a hook on a missing target without an error."""

import pkgutil

import pytest

from tests.support.faults import EXCEPTIONS, FAULTS
from tests.support.guards import GUARDS

TARGETS = {name: target for table in (GUARDS, FAULTS) for name, (target, _) in table.items()} | EXCEPTIONS


@pytest.mark.parametrize("name", TARGETS)
def test_target_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(TARGETS[name]))
