"""What `kv: auto` measures of the store: real copies, of which nothing remains."""

import errno
import os
from pathlib import Path

import pytest

from sglang_april.kv.kv_pages import CopyTier
from tests.unit.rank_store import RankStore
from tests.unit.test_page_store import Faulty, slots_of


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_trial_leaves_nothing_behind(tmp_path: Path, tier: CopyTier) -> None:
    """The arena, the directory and the pool are as before; both ways took time."""
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


def test_a_tier_that_cannot_be_measured_says_why(tmp_path: Path) -> None:
    """A rate of copies that failed would make keeping look free."""
    rank = RankStore(tmp_path, pages=1, write=Faulty(errno.ENOSPC))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        rank.store.benchmark_copy("disk", slots_of(9))
    with pytest.raises(MemoryError):
        rank.store.benchmark_copy("host", slots_of(9))
    assert rank.arena.free_pages == 1
    rank.close()
