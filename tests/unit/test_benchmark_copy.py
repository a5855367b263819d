"""`PageStore.benchmark_copy`: real copies that leave nothing behind."""

import errno
import os
from pathlib import Path

import pytest

from sglang_april.kv.kv_pages import CopyTier
from tests.unit.rank_store import RankStore, slots_of
from tests.unit.test_disk_tier import Faulty


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_benchmark_copy_leaves_nothing_behind(tmp_path: Path, tier: CopyTier) -> None:
    """Arena, directory and pool are unchanged; both directions took time."""
    rank = RankStore(tmp_path)
    slots = slots_of(9)
    before, free = rank.rows(slots), rank.arena.free_pages
    out, back = rank.store.benchmark_copy(tier, slots)
    assert out > 0
    assert back > 0
    assert (rank.rows(slots) == before).all()
    assert (rank.arena.free_pages, [p.name for p in tmp_path.iterdir()]) == (free, ["lock.r0"])
    rank.store.verify(1)
    assert rank.outcome(1) == ""
    rank.close()


def test_failing_tier_raises_its_error(tmp_path: Path) -> None:
    """A rate derived from failed copies would make keeping look free."""
    rank = RankStore(tmp_path, pages=1, write=Faulty(errno.ENOSPC))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        rank.store.benchmark_copy("disk", slots_of(9))
    with pytest.raises(MemoryError):
        rank.store.benchmark_copy("host", slots_of(9))
    assert rank.arena.free_pages == 1
    rank.close()
