"""Copies and loads that are cancelled while they wait for the page store's thread, or while it carries them out."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sglang_april.kv.page_store import PageStore
from tests.unit.rank_store import KEY, OTHER_SLOTS, PAGE, RankStore

CANCELLED = "OrderCancelledError: the order was cancelled"
OLD, NEW = torch.arange(3 * PAGE), torch.arange(3 * PAGE, 4 * PAGE)


class HeldCopier:
    """The copier's method `name` does its work and then waits, in its `at`-th call, until it is released."""

    def __init__(self, rank: RankStore, name: str, at: int = 1) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.calls, self.slots = 0, list[int]()
        """The slots that were copied."""
        self._stock, self._at = getattr(rank.store._copier, name), at
        setattr(rank.store._copier, name, self)

    def __call__(self, slots: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        self.slots += slots.tolist()
        result = self._stock(slots, *args)
        if self.calls == self._at:
            self.entered.set()
            assert self.released.wait(20)
        return result


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[RankStore]:
    """Its arena has ranges of one page."""
    rank = RankStore(tmp_path)
    rank.arena.free([run for _ in range(64) for run in rank.arena.allocate(1)][::2])
    yield rank
    rank.close()


def copy(rank: RankStore, tier: str, number: int, slots: torch.Tensor) -> None:
    """An order with the number of the copy."""
    if tier == "host":
        rank.store.copy_to_host(number, number, slots, None)
    else:
        rank.store.copy_to_disk(number, number, slots, KEY._replace(member=number), 3)


def cancel(store: PageStore, order: int) -> threading.Thread:
    """Cancel in a thread, as the scheduler does."""
    thread = threading.Thread(target=store.cancel, args=(order,))
    thread.start()
    thread.join(0.1)
    return thread


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_copy_that_is_cancelled_before_it_is_made_does_nothing(
    rank: RankStore, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are free, and a release may have unmapped the pool. The orders before it are not waited for."""
    held = HeldCopier(rank, "gather", at=3)
    copy(rank, tier, 1, OLD)
    copy(rank, tier, 2, NEW)
    assert held.entered.wait(60)
    begun = Mock(side_effect=MemoryError("begun"))
    monkeypatch.setattr(rank.arena, "allocate", begun)
    monkeypatch.setattr(rank.disk, "save", begun)
    rank.store.cancel(2)
    rank.store.discard(2)
    held.released.set()
    assert (rank.outcome(1), rank.outcome(2)) == ("", CANCELLED)
    assert held.slots == OLD.tolist()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_copy_that_is_cancelled_while_it_is_made_reads_nothing_afterwards(
    rank: RankStore, tmp_path: Path, tier: str, chunk: int
) -> None:
    """The slots belong to another request then: no copy may have its KV, with right checksums. A server that is killed
    before the file is discarded would find it after its restart."""
    wanted = rank.rows(OLD)
    held = HeldCopier(rank, "gather", at=chunk)
    copy(rank, tier, 1, OLD)
    assert held.entered.wait(60)
    waiting = cancel(rank.store, 1)
    assert waiting.is_alive(), "the copy reads the pool"
    copy(rank, tier, 2, NEW)
    held.released.set()
    waiting.join(60)
    rank.fill(OLD)
    assert rank.outcome(1) == (CANCELLED if chunk == 1 else "")
    assert rank.outcome(2) == ""
    assert held.slots == [*OLD[: chunk * PAGE].tolist(), *NEW.tolist()]
    rank.store.load(3, 1, OTHER_SLOTS[: len(OLD)])
    if chunk == 1:
        assert "never stored" in rank.outcome(3)
        assert len(list(tmp_path.glob("*.kv"))) == (1 if tier == "disk" else 0)
    else:
        assert rank.outcome(3) == ""
        assert torch.equal(rank.rows(OTHER_SLOTS[: len(OLD)]), wanted)


def test_a_prefix_of_a_cancelled_copy_is_stored_by_the_next_user(rank: RankStore) -> None:
    """The first copy is cancelled while it reads the shared prompt."""
    prompt, members = OLD[: 2 * PAGE], [torch.cat([OLD[: 2 * PAGE], torch.tensor([i])]) for i in (100, 101)]
    wanted = rank.rows(members[1])
    held = HeldCopier(rank, "gather")
    for number in (1, 2):
        rank.store.copy_to_host(number, number, members[number - 1], (5, len(prompt)))
    assert held.entered.wait(60)
    waiting = cancel(rank.store, 1)
    held.released.set()
    waiting.join(60)
    rank.store.discard(1)
    rank.fill(members[0][-1:])
    assert (rank.outcome(1), rank.outcome(2)) == (CANCELLED, "")
    rank.store.load(3, 2, OTHER_SLOTS[: len(members[1])])
    assert rank.outcome(3) == ""
    assert torch.equal(rank.rows(OTHER_SLOTS[: len(members[1])]), wanted)


def stored(rank: RankStore, tier: str, number: int) -> None:
    copy(rank, tier, number, OLD)
    assert rank.outcome(number) == ""


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_load_that_is_cancelled_while_it_writes_leaves_the_other_slots(rank: RankStore, tier: str) -> None:
    """What a request writes to the slots afterwards stays; the copy is complete and can be loaded again."""
    stored(rank, tier, 1)
    target, wanted = OTHER_SLOTS[: len(OLD)], rank.rows(OLD)
    held = HeldCopier(rank, "scatter")
    rank.store.load(2, 1, target)
    assert held.entered.wait(60)
    waiting = cancel(rank.store, 2)
    assert waiting.is_alive(), "the load writes to the pool"
    held.released.set()
    waiting.join(60)
    rank.fill(target)
    written = rank.rows(target)
    assert rank.outcome(2) == CANCELLED
    assert torch.equal(rank.rows(target), written)
    rank.store.load(3, 1, target)
    assert rank.outcome(3) == ""
    assert torch.equal(rank.rows(target), wanted)


def test_a_load_behind_the_spill_of_its_copy_is_cancelled_at_once(rank: RankStore) -> None:
    """The disk is slow, and the next step needs the slots."""
    stored(rank, "host", 1)
    entered, released = threading.Event(), threading.Event()
    write: Callable[..., int] = rank.disk._write

    def slow(fd: int, data: memoryview) -> int:
        entered.set()
        assert released.wait(60)
        return write(fd, data)

    rank.disk._write = slow
    rank.store.spill(2, 1, KEY, len(OLD), 3)
    rank.store.load(3, 1, OTHER_SLOTS[: len(OLD)])
    assert entered.wait(60)
    rank.store.cancel(3)
    before = rank.rows(OTHER_SLOTS)
    released.set()
    assert (rank.outcome(2), rank.outcome(3)) == ("", CANCELLED)
    assert torch.equal(rank.rows(OTHER_SLOTS), before)


def test_an_order_that_has_ended_is_not_cancelled(rank: RankStore) -> None:
    stored(rank, "host", 1)
    rank.store.cancel(1)
    rank.store.load(1, 1, OTHER_SLOTS[: len(OLD)])
    assert rank.outcome(1) == ""
