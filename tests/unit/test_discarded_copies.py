"""Copies that are discarded while they wait for the page store's thread, or while it makes them."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.rank_store import KEY, PAGE, RankStore


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_copy_that_is_discarded_before_it_is_made_does_not_read_the_pool(tmp_path: Path, tier: str) -> None:
    """Its slots are free, and a release may have unmapped the pool."""
    rank = RankStore(tmp_path)
    gather, started, may_go = rank.store._copier.gather, threading.Event(), threading.Event()
    read: list[list[int]] = []

    def slow(slots: torch.Tensor, pages: torch.Tensor, fence: Any) -> torch.Tensor:
        read.append(slots.tolist())
        started.set()
        assert may_go.wait(10)
        return gather(slots, pages, fence)

    rank.store._copier.gather = slow  # type: ignore[method-assign]
    first, second = torch.arange(PAGE), torch.arange(PAGE, 2 * PAGE)
    for number, slots in ((1, first), (2, second)):
        if tier == "host":
            rank.store.copy_to_host(number, number, slots, None)
        else:
            rank.store.copy_to_disk(number, number, slots, KEY, 0)
    assert started.wait(10)
    rank.store.discard(2)
    waited = threading.Thread(target=rank.store.wait_for_pool)
    waited.start()
    waited.join(0.1)
    assert waited.is_alive(), "the first copy reads the pool"
    may_go.set()
    waited.join(10)
    assert not waited.is_alive()
    assert rank.outcome(2) == ""
    rank.close()
    assert read == [first.tolist()]


def test_a_copy_to_disk_that_is_discarded_while_it_is_made_leaves_no_file(tmp_path: Path) -> None:
    """The slots belong to another request then. A server that is killed before the order that discards the file would
    find it after its restart, with right checksums."""
    rank = RankStore(tmp_path)
    gather, started, may_go = rank.store._copier.gather, threading.Event(), threading.Event()

    def slow(slots: torch.Tensor, pages: torch.Tensor, fence: Any) -> torch.Tensor:
        checksums = gather(slots, pages, fence)
        started.set()
        assert may_go.wait(10)
        return checksums

    rank.store._copier.gather = slow  # type: ignore[method-assign]
    slots = torch.arange(3 * PAGE)
    rank.store.copy_to_disk(1, 1, slots, KEY, 3)
    assert started.wait(10)
    rank.store._discarded.add(1)  # as `discard` does; its order waits behind others
    rank.fill(slots)
    may_go.set()
    assert "discarded" in rank.outcome(1)
    assert not list(tmp_path.glob("*.kv"))
    rank.close()
