"""KV that the radix tree must not get, because stock requests would be answered wrongly from it."""

from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("sglang")

from sglang_april.adapter.core.engine import SchedulerEngine
from sglang_april.kv.kv_pages import Pages
from tests.unit.test_tiers import FourPartials


@pytest.mark.parametrize("keeps_experts", [True, False])
def test_loaded_kv_is_private_where_sglang_keeps_the_experts_of_each_slot(keeps_experts: bool) -> None:
    """A request with `return_routed_experts` would get other tokens' experts for its cached prefix."""
    w = FourPartials()
    loaded, kept = w.samples[:2]
    w.tiers.demote(loaded, "host")
    w.complete()
    w.resume(loaded)
    engine: Any = SchedulerEngine.__new__(SchedulerEngine)
    engine.version, engine._keeps_experts = loaded.kv.version, keeps_experts
    engine.pages, engine._s = MagicMock(), MagicMock()
    for sample in (loaded, kept):
        sample.request, sample.kv.pages = MagicMock(), Pages(50, 0, [0] * 50, None, "")
    engine.attach([loaded, kept])
    assert engine.pages.build_decode_batch.call_args.args[2] == [keeps_experts, False]
    loaded.kv.pages = Pages(50, 0, [0] * 50, None, "")  # an ended leg's, for the next one
    engine.hand_over(loaded)
    assert loaded.request.skip_radix_cache_insert is keeps_experts
    loaded.kv.begin(engine.version)
    assert not engine._is_private(loaded), "a prefill has computed it again"
