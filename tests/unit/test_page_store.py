"""One rank's page store on a small CPU pool: a round trip restores every byte, or its order fails."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_april.kv.disk_tier import DiskPages
from sglang_april.kv.host_tier import HostArena, HostPages, PageRange, pinned_slab_pages
from tests.unit.rank_store import KEY, OTHER_SLOTS, RankStore, slots_of


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[RankStore]:
    rank = RankStore(tmp_path)
    yield rank
    rank.close()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 37])
@pytest.mark.parametrize("route", ["host", "disk", "spilled"])
def test_round_trip_into_other_slots(rank: RankStore, route: str, length: int) -> None:
    """Last pages may be partial; other rows of the pool do not change."""
    slots, target = slots_of(length), OTHER_SLOTS[:length]
    wanted, others = rank.rows(slots), rank.rows(OTHER_SLOTS[length:])
    if route == "disk":
        rank.store.copy_to_disk(1, 7, slots, KEY, 3)
    else:
        rank.store.copy_to_host(1, 7, slots, None)
    if route == "spilled":
        rank.store.spill(2, 7, KEY, length, 3)
        assert rank.outcome(2) == ""
        assert rank.arena.free_pages == 64
    rank.store.load(3, 7, target)
    assert (rank.outcome(1), rank.outcome(3)) == ("", "")
    assert torch.equal(rank.rows(target), wanted)
    assert torch.equal(rank.rows(OTHER_SLOTS[length:]), others)


@pytest.mark.parametrize("spill", [False, True])
def test_group_members_share_one_stored_prompt(rank: RankStore, spill: bool) -> None:
    """Two members share a prefix of 8 tokens: 2 + 1 + 1 pages. Each is restored in full, also from disk."""
    prompt = slots_of(8)
    members = [torch.cat([prompt, torch.tensor([100 + 10 * i, 101 + 10 * i])]) for i in range(2)]
    wanted = [rank.rows(m) for m in members]
    for i, member in enumerate(members):
        rank.store.copy_to_host(i, 10 + i, member, (5, 8))
        assert rank.outcome(i) == ""
    assert rank.arena.free_pages == 64 - 4
    if spill:
        rank.store.spill(2, 10, KEY, 10, 0)
        rank.store.discard(11)
        rank.store.discard(5)
        rank.store.load(3, 10, OTHER_SLOTS[:10])
        assert rank.outcome(3) == ""
        assert torch.equal(rank.rows(OTHER_SLOTS[:10]), wanted[0])
        rank.store.verify(4)  # after the discards, which the load has overtaken
        assert rank.outcome(4) == ""
        assert rank.arena.free_pages == 64
        return
    for i, member in enumerate(members):
        rank.store.load(3 + i, 10 + i, OTHER_SLOTS[: len(member)])
        assert rank.outcome(3 + i) == ""
        assert torch.equal(rank.rows(OTHER_SLOTS[: len(member)]), wanted[i])


def held(rank: RankStore, number: int) -> HostPages | DiskPages:
    return rank.store._copies._held[number]


def flip_a_bit(rank: RankStore, where: str, folder: Path) -> None:
    if where == "disk":
        (path,) = folder.glob("*.kv")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    else:
        pages = held(rank, 7)
        assert isinstance(pages, HostPages)
        rank.arena.pages(pages.ranges[0])[0, 3] ^= 4


@pytest.mark.parametrize("where", ["host", "disk"])
def test_damaged_page_fails_the_load_and_is_not_used(rank: RankStore, where: str, tmp_path: Path) -> None:
    """The load fails, `verify` names the copy, and other copies are unaffected."""
    slots = slots_of(9)
    if where == "disk":
        rank.store.copy_to_disk(1, 7, slots, KEY, 0)
    else:
        rank.store.copy_to_host(1, 7, slots, None)
    rank.store.copy_to_host(2, 8, slots, None)
    rank.store.verify(3)
    assert [rank.outcome(i) for i in (1, 2, 3)] == ["", "", ""]
    flip_a_bit(rank, where, tmp_path)
    rank.store.load(4, 7, OTHER_SLOTS[:9])
    assert "damaged" in rank.outcome(4)
    rank.store.verify(5)
    assert rank.outcome(5).endswith("copies 7 are damaged")
    rank.store.load(6, 8, OTHER_SLOTS[:9])
    assert rank.outcome(6) == ""
    assert torch.equal(rank.rows(OTHER_SLOTS[:9]), rank.rows(slots))


def test_arena_allocates_each_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges do not cross slabs, adjacent free ranges merge, and a failed allocation changes nothing."""
    monkeypatch.setattr("sglang_april.kv.host_tier.SLAB_BYTES", 4 * 8 * 10)
    arena = HostArena(35, 8, pinned=False)
    rng, taken = random.Random(0), []
    for _ in range(300):
        if taken and rng.random() < 0.5:
            arena.free(taken.pop(rng.randrange(len(taken))))
        elif (pages := rng.randint(1, 12)) <= arena.free_pages:
            taken.append(arena.allocate(pages))
            assert sum(run.size for run in taken[-1]) == pages
        else:
            with pytest.raises(MemoryError):
                arena.allocate(pages)
        numbers = [n for runs in taken for run in runs for n in range(run.start, run.start + run.size)]
        assert len(numbers) == len(set(numbers)) == 35 - arena.free_pages
        assert all(run.start // 10 == (run.start + run.size - 1) // 10 for runs in taken for run in runs)
    for runs in taken:
        arena.free(runs)
    assert arena._free == [PageRange(0, 10), PageRange(10, 10), PageRange(20, 10), PageRange(30, 5)]
    assert {number: len(slab) for number, slab in arena._slabs.items()} == {0: 10, 1: 10, 2: 10, 3: 5}

    fresh = HostArena(10, 8, pinned=False)
    monkeypatch.setattr(torch, "empty", lambda *_a, **_k: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(MemoryError, match="cannot grow"):
        fresh.allocate(3)
    assert fresh.free_pages == 10


@pytest.mark.parametrize("page_mib", [0.3, 5, 12.5, 16.1, 33])
def test_pinned_slabs_waste_little_of_what_torch_rounds_up_to_a_power_of_two(page_mib: float) -> None:
    page_bytes = int(page_mib * 2**20)
    size = pinned_slab_pages(page_bytes) * page_bytes
    assert size / 2 ** math.ceil(math.log2(size)) >= 7 / 8


@pytest.mark.parametrize(("pages", "rows"), [(3, [3]), (10, [10]), (11, [10, 1]), (25, [10, 10, 5])])
def test_arena_allocates_no_more_memory_than_its_pages(
    monkeypatch: pytest.MonkeyPatch, pages: int, rows: list[int]
) -> None:
    """A slab holds 10 pages here; no two pages overlap."""
    monkeypatch.setattr("sglang_april.kv.host_tier.SLAB_BYTES", 4 * 8 * 10)
    arena = HostArena(pages, 8, pinned=False)
    runs = arena.allocate(pages)
    assert [len(arena._slabs[number]) for number in sorted(arena._slabs)] == rows
    for run in runs:
        arena.pages(run).copy_(torch.arange(run.start, run.start + run.size)[:, None].expand(-1, 8))
    assert [arena.pages(PageRange(i, 1))[0, 0].item() for i in range(pages)] == list(range(pages))
