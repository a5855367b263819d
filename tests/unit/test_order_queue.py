"""The page store's worker: loads overtake other copies' orders, checks fill the gaps, and nothing is read too early."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_april.kv import stored_copies
from sglang_april.kv.order_queue import OrderQueue
from tests.unit.rank_store import KEY, OTHER_SLOTS, RankStore, slots_of


class HeldDisk:
    """`os.write` that blocks until it is released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self, file: int, data: memoryview) -> int:
        self.entered.set()
        assert self.released.wait(60)
        return os.write(file, data)


@pytest.fixture
def disk() -> HeldDisk:
    return HeldDisk()


@pytest.fixture
def rank(tmp_path: Path, disk: HeldDisk) -> Iterator[RankStore]:
    rank = RankStore(tmp_path, write=disk)
    yield rank
    disk.released.set()
    rank.close()


def test_load_overtakes_waiting_spills_but_not_those_of_its_own_copy(rank: RankStore, disk: HeldDisk) -> None:
    """Three spills wait for a slow disk; a load from the host needs none of them."""
    slots = [slots_of(8, seed=i) for i in range(4)]
    wanted = [rank.rows(s) for s in slots]
    for i, s in enumerate(slots):
        rank.store.copy_to_host(i, 10 + i, s, None)
        assert rank.outcome(i) == ""
    done: list[int] = []
    report = rank.store._report
    rank.store._report = lambda order, failure: (done.append(order), report(order, failure))[1]
    for i in range(3):
        rank.store.spill(20 + i, 10 + i, KEY._replace(member=i), 8, 0)
    assert disk.entered.wait(60)  # the first spill writes
    rank.store.load(30, 12, OTHER_SLOTS[8:16])
    rank.store.load(31, 13, OTHER_SLOTS[:8])
    disk.released.set()
    assert [rank.outcome(order) for order in (20, 21, 22, 30, 31)] == [""] * 5
    assert done == [20, 31, 21, 22, 30]
    assert torch.equal(rank.rows(OTHER_SLOTS[:8]), wanted[3])
    assert torch.equal(rank.rows(OTHER_SLOTS[8:16]), wanted[2])


def test_check_runs_in_slices_between_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long check delays an order by one slice, and a copy that is discarded meanwhile is not damaged."""
    monkeypatch.setattr(stored_copies, "VERIFY_BYTES", 1)
    rank = RankStore(tmp_path)
    for i in range(4):
        rank.store.copy_to_host(i, 10 + i, slots_of(32, seed=i), None)
        assert rank.outcome(i) == ""
    started, held = threading.Event(), threading.Event()
    checksum, slices = stored_copies.kv_pages.checksum, []

    def slow_checksum(pages: torch.Tensor) -> torch.Tensor:
        slices.append(len(pages))
        started.set()
        assert held.wait(60)
        return checksum(pages)

    monkeypatch.setattr(stored_copies.kv_pages, "checksum", slow_checksum)
    rank.store.verify(50)
    assert started.wait(60)
    rank.store.discard(10)
    rank.store.load(51, 11, OTHER_SLOTS[:32])
    held.set()
    assert rank.outcome(51) == ""
    assert rank.outcome(50) == ""
    assert list(rank.reports)[-2:] == [51, 50]
    assert set(slices) == {1}
    rank.close()


def test_check_of_a_file_does_not_share_its_memory_with_other_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a chunk of a copy is larger than a slice of a check, between two of which a load reads another file."""
    monkeypatch.setattr(stored_copies, "VERIFY_BYTES", 1)
    rank = RankStore(tmp_path, chunk_bytes=1 << 20)
    for i in range(2):
        rank.store.copy_to_disk(i, 10 + i, slots_of(16, seed=i), KEY._replace(member=i), 0)
        assert rank.outcome(i) == ""
    started, held = threading.Event(), threading.Event()
    checksum = stored_copies.kv_pages.checksum

    def slow_checksum(pages: torch.Tensor) -> torch.Tensor:
        started.set()
        assert held.wait(60)
        return checksum(pages)

    monkeypatch.setattr(stored_copies.kv_pages, "checksum", slow_checksum)
    rank.store.verify(50)
    assert started.wait(60)
    rank.store.load(51, 11, OTHER_SLOTS[:16])
    held.set()
    assert (rank.outcome(51), rank.outcome(50)) == ("", "")
    rank.close()


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["put", "load", "idle"]), st.integers(0, 3)), max_size=40))
def test_any_sequence_keeps_the_order_of_each_copy(steps: list[tuple[str, int]]) -> None:
    """Loads run after every earlier order of their copy and before every later one; nothing is lost."""
    orders, submitted, executed = OrderQueue(), [], []
    idle = 0
    for position, (kind, number) in enumerate(steps):
        if kind == "idle":
            if not idle:
                orders.put_idle(-1, iter([None] * 3))
                idle = 1
            continue
        submitted.append((position, kind, number))
        put = orders.put_load if kind == "load" else orders.put
        put(position, number, lambda: None)
    ended = 0
    if not submitted and not idle:
        return
    for order, act in orders:
        act()
        if order == -1:
            ended += 1
        else:
            executed.append(order)
        if len(executed) == len(submitted) and ended == idle:
            break
    assert sorted(executed) == [position for position, _, _ in submitted]
    for number in range(4):
        mine = [position for position, _, n in submitted if n == number]
        loads = {position for position, kind, n in submitted if kind == "load"}
        ran = [position for position in executed if position in mine]
        for load in loads & set(mine):
            others = set(mine) - loads
            assert {p for p in ran[: ran.index(load)] if p in others} == {p for p in others if p < load}
    plain = [position for position in executed if ("put", position) in {(k, p) for p, k, _ in submitted}]
    assert plain == sorted(plain)


def test_failed_check_names_the_damaged_copies(tmp_path: Path) -> None:
    rank = RankStore(tmp_path)
    for i in range(2):
        rank.store.copy_to_host(i, 10 + i, slots_of(8, seed=i), None)
        assert rank.outcome(i) == ""
    held = rank.store._copies._held[11]
    rank.arena.pages(held.ranges[0])[0, 0] ^= 4  # type: ignore[union-attr]
    rank.store.verify(50)
    assert rank.outcome(50) == "DamagedError: copies 11 are damaged"
    rank.store.verify(51)
    assert "11" in rank.outcome(51)
    rank.close()
