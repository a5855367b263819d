"""The table of hooks: every row leads somewhere and says why it is there."""

from pathlib import Path

import pytest

from sglang_april.adapter import preflight
from sglang_april.adapter.targets import TARGETS, Target

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.path}-{target.kind}")
def test_the_handler_exists(target: Target) -> None:
    assert preflight.describe(target.handler.replace(":", "."), ROOT)["kind"] in ("def", "async def")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.path}-{target.kind}")
def test_the_row_is_explained(target: Target) -> None:
    assert target.why
    assert target.remove_when
    module = preflight.locate(target.path, preflight.sglang_root())[0]
    assert module.removeprefix("sglang/srt/") in target.upstream
