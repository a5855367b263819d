"""One rank's page store on a small CPU pool: what goes out comes back, or its order fails; never a wrong byte."""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from april_kernels.kv_pages import PlaneTable
from sglang_april.store.device import CpuCopier
from sglang_april.store.disk import Disk, DiskError, Key
from sglang_april.store.entry import Found
from sglang_april.store.form import FullPages
from sglang_april.store.host import Arena, Run
from sglang_april.store.pages import DiskPages, HostPages, PageStore
from sglang_april.store.regain import Search

PAGE, SLOTS = 4, 256


class Rank:
    """A store on a pool of two layers; K and V rows of different sizes. One page is a piece, so copies are cut."""

    def __init__(
        self, folder: Path | None, pages: int = 64, write: Callable[[int, memoryview], int] = os.write
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = ([torch.rand(SLOTS, 2, dim, generator=generator) for _ in range(2)] for dim in (4, 2))
        copier = CpuCopier(FullPages(PlaneTable.mha(self.k, self.v), PAGE), piece_bytes=1)
        self.arena = Arena(pages, copier.page_words, pinned=False)
        self.disk = Disk(folder, 0, "layout", PAGE, copier.page_words, write)
        self.reports: dict[int, str] = {}
        self.store = PageStore(copier, self.arena, self.disk, self.reports.__setitem__)

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """The KV of tokens, and nothing else of the pool."""
        return torch.cat([buffer[slots].flatten(1) for buffer in (*self.k, *self.v)], dim=1)

    def fill(self, slots: torch.Tensor) -> None:
        """As a forward does."""
        for buffer in (*self.k, *self.v):
            buffer[slots] = torch.rand(len(slots), *buffer.shape[1:])

    def outcome(self, order: int) -> str:
        self.store.wait(order)
        while order not in self.reports:
            time.sleep(0)  # reported right after
        return self.reports[order]

    def close(self) -> None:
        self.store.close()
        self.disk.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.close()


def slots_of(count: int, seed: int = 1) -> torch.Tensor:
    """Scattered slots."""
    return torch.tensor(random.Random(seed).sample(range(SLOTS // 2), count))


ELSEWHERE = torch.arange(SLOTS // 2, SLOTS)
KEY = Key("run", "prompt", 0, 1)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 37])
@pytest.mark.parametrize("way", ["host", "disk", "spilled"])
def test_pages_come_back_into_other_slots(rank: Rank, way: str, length: int) -> None:
    """Design section 7: partial last pages; other rows of the pool stay as they were."""
    slots, target = slots_of(length), ELSEWHERE[:length]
    wanted, others = rank.rows(slots), rank.rows(ELSEWHERE[length:])
    if way == "disk":
        rank.store.put_on_disk(1, 7, slots, KEY, 3)
    else:
        rank.store.put(1, 7, slots, None)
    if way == "spilled":
        rank.store.spill(2, 7, KEY, length, 3)
        assert rank.outcome(2) == ""
        assert rank.arena.free_pages == 64
    rank.store.get(3, 7, target)
    assert (rank.outcome(1), rank.outcome(3)) == ("", "")
    assert torch.equal(rank.rows(target), wanted)
    assert torch.equal(rank.rows(ELSEWHERE[length:]), others)


@pytest.mark.parametrize("spill", [False, True])
def test_a_prompt_is_stored_once_for_its_group(rank: Rank, spill: bool) -> None:
    """Two members on one prefix of 8 tokens: 2 + 1 + 1 pages; each comes back whole, from the disk too."""
    prompt = slots_of(8)
    members = [torch.cat([prompt, torch.tensor([100 + 10 * i, 101 + 10 * i])]) for i in range(2)]
    wanted = [rank.rows(m) for m in members]
    for i, member in enumerate(members):
        rank.store.put(i, 10 + i, member, (5, 8))
        assert rank.outcome(i) == ""
    assert rank.arena.free_pages == 64 - 4
    if spill:
        rank.store.spill(2, 10, KEY, 10, 0)
        rank.store.discard(11)
        rank.store.discard(5)
        rank.store.get(3, 10, ELSEWHERE[:10])
        assert rank.outcome(3) == ""
        assert torch.equal(rank.rows(ELSEWHERE[:10]), wanted[0])
        assert rank.arena.free_pages == 64
        return
    for i, member in enumerate(members):
        rank.store.get(3 + i, 10 + i, ELSEWHERE[: len(member)])
        assert rank.outcome(3 + i) == ""
        assert torch.equal(rank.rows(ELSEWHERE[: len(member)]), wanted[i])


def held(rank: Rank, number: int) -> HostPages | DiskPages:
    return rank.store._held[number]


def flip_a_bit(rank: Rank, where: str, folder: Path) -> None:
    if where == "disk":
        (path,) = folder.glob("*.kv")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    else:
        pages = held(rank, 7)
        assert isinstance(pages, HostPages)
        rank.arena.pages(pages.runs[0])[0, 3] ^= 4


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_flipped_bit_is_found_and_nothing_of_its_page_is_used(rank: Rank, where: str, tmp_path: Path) -> None:
    """The order fails, and so does a check of everything, which names the copy; other copies are untouched."""
    slots = slots_of(9)
    if where == "disk":
        rank.store.put_on_disk(1, 7, slots, KEY, 0)
    else:
        rank.store.put(1, 7, slots, None)
    rank.store.put(2, 8, slots, None)
    rank.store.verify(3)
    assert [rank.outcome(i) for i in (1, 2, 3)] == ["", "", ""]
    flip_a_bit(rank, where, tmp_path)
    rank.store.get(4, 7, ELSEWHERE[:9])
    assert "damaged" in rank.outcome(4)
    rank.store.verify(5)
    assert rank.outcome(5).endswith("copies 7 are damaged")
    rank.store.get(6, 8, ELSEWHERE[:9])
    assert rank.outcome(6) == ""
    assert torch.equal(rank.rows(ELSEWHERE[:9]), rank.rows(slots))


class Faulty:
    """`os.write` that fails, or writes less than it was given, from the second call on."""

    def __init__(self, fault: int | str) -> None:
        self.fault, self.calls = fault, 0

    def __call__(self, fd: int, data: memoryview) -> int:
        self.calls += 1
        if self.calls > 1 and isinstance(self.fault, int):
            raise OSError(self.fault, os.strerror(self.fault))
        return os.write(fd, data[: max(1, len(data) // 2)] if self.fault == "short" else data)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("way", ["disk", "spilled"])
def test_a_file_that_cannot_be_written_costs_the_copy_and_nothing_else(tmp_path: Path, fault: int, way: str) -> None:
    """No half file is left, the room on the host is free again, and the store goes on."""
    rank = Rank(tmp_path, write=Faulty(fault))
    slots = slots_of(9)
    if way == "disk":
        rank.store.put_on_disk(1, 7, slots, KEY, 0)
    else:
        rank.store.put(0, 7, slots, None)
        rank.store.spill(1, 7, KEY, 9, 0)
    assert os.strerror(fault) in rank.outcome(1)
    rank.store.get(2, 7, ELSEWHERE[:9])
    assert "never stored" in rank.outcome(2)
    assert [p.name for p in tmp_path.iterdir()] == ["lock.r0"]
    assert rank.arena.free_pages == 64
    rank.store.put(3, 8, slots, None)
    assert rank.outcome(3) == ""
    rank.close()


def test_short_writes_are_written_on(tmp_path: Path) -> None:
    rank = Rank(tmp_path, write=Faulty("short"))
    rank.store.put_on_disk(1, 7, slots_of(9), KEY, 0)
    rank.store.get(2, 7, ELSEWHERE[:9])
    assert (rank.outcome(1), rank.outcome(2)) == ("", "")
    assert torch.equal(rank.rows(ELSEWHERE[:9]), rank.rows(slots_of(9)))
    rank.close()


def test_a_directory_that_went_away(rank: Rank, tmp_path: Path) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    rank.store.put_on_disk(1, 7, slots_of(9), KEY, 0)
    assert "No such file" in rank.outcome(1)
    tmp_path.mkdir()
    rank.store.put_on_disk(2, 7, slots_of(9), KEY, 0)
    assert rank.outcome(2) == ""


def test_a_directory_serves_one_server(rank: Rank, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="in use by another server"):
        Disk(tmp_path, 0, "layout", PAGE, 8)
    with pytest.raises(DiskError, match="cannot be used"):
        Disk(tmp_path / "missing", 0, "layout", PAGE, 8)


@pytest.mark.parametrize("fault", ["none", "bit", "short", "empty", "header", "model", "missing", "older", "version"])
def test_a_restart_finds_the_kv_that_is_wanted_or_says_why_not(tmp_path: Path, fault: str) -> None:
    """S8: sound and just of these tokens; what is not taken over is gone, as are files that nobody asks for."""
    first = Rank(tmp_path)
    wanted = first.rows(slots_of(9))
    first.store.put_on_disk(1, 7, slots_of(9), KEY, 3)
    first.store.put_on_disk(2, 8, slots_of(9), Key("run", "other", 0, 0), 3)
    assert (first.outcome(1), first.outcome(2)) == ("", "")
    first.disk.begin("life", [KEY, Key("run", "other", 0, 0)])
    first.close()
    again = Rank(tmp_path)
    disk = again.disk
    (tmp_path / "x.r0.part").write_bytes(b"half")
    spoil(disk, fault)
    search = Search(disk, "life")
    (outcome,) = search.look([(KEY, Found(9 + (fault == "older"), 3 - (fault == "version")))])
    assert outcome == {"none": "", "missing": None, "older": None, "version": None}.get(fault, outcome)
    assert outcome != "" or fault == "none"
    assert search.bytes_read == (disk._path(KEY).stat().st_size if fault == "none" else 0)
    disk.begin("next", [KEY] if outcome == "" else [])
    assert sorted(p.suffix for p in tmp_path.iterdir()) == ([".kv", ".r0"] if fault == "none" else [".r0"])
    if outcome == "":
        again.store.adopt(20, KEY, 9)
        again.store.get(1, 20, ELSEWHERE[:9])
        assert again.outcome(1) == ""
        assert torch.equal(again.rows(ELSEWHERE[:9]), wanted)
    again.close()


def spoil(disk: Disk, fault: str) -> None:
    path = disk._path(KEY)
    data = bytearray(path.read_bytes())
    if fault == "bit":
        data[len(data) // 2] ^= 1
    elif fault == "header":
        data[20] ^= 1
    elif fault == "model":
        disk._layout = "another"
    path.write_bytes(data[: {"short": len(data) - 7, "empty": 0}.get(fault, len(data))])
    if fault == "missing":
        path.unlink()


@pytest.mark.parametrize("life", ["", "another", "lif", "life and more"])
def test_files_of_another_life_are_not_looked_at(rank: Rank, life: str) -> None:
    """Without a journal there is no life, and of another's history nothing is known."""
    rank.disk.begin("a much longer name than the next")
    rank.disk.begin(life)
    rank.store.put_on_disk(1, 7, slots_of(9), KEY, 3)
    assert rank.outcome(1) == ""
    assert rank.disk.life == life
    assert Search(rank.disk, "life").look([(KEY, Found(9, 3))]) == [None]
    assert Search(rank.disk, "").look([(KEY, Found(9, 3))]) == [None]
    rank.disk.begin("life", [KEY])
    assert Search(rank.disk, "life").look([(KEY, Found(9, 3))]) == [""]


def test_a_stale_file_that_stays_ends_the_start(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be of the next life by its name; the life before keeps its own."""
    rank.disk.begin("before")
    rank.store.put_on_disk(1, 7, slots_of(9), KEY, 3)
    assert rank.outcome(1) == ""

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DiskError, match=f"{tmp_path} cannot be used: Operation not permitted"):
        rank.disk.begin("next")
    assert rank.disk.life == "before"


def test_an_arena_gives_every_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs do not cross slabs, neighbours are joined again, and a machine without memory changes nothing."""
    monkeypatch.setattr("sglang_april.store.host.SLAB_BYTES", 4 * 8 * 10)
    arena = Arena(35, 8, pinned=False)
    rng, taken = random.Random(0), []
    for _ in range(300):
        if taken and rng.random() < 0.5:
            arena.give(taken.pop(rng.randrange(len(taken))))
        elif (pages := rng.randint(1, 12)) <= arena.free_pages:
            taken.append(arena.take(pages))
            assert sum(run.size for run in taken[-1]) == pages
        else:
            with pytest.raises(MemoryError):
                arena.take(pages)
        numbers = [n for runs in taken for run in runs for n in range(run.start, run.start + run.size)]
        assert len(numbers) == len(set(numbers)) == 35 - arena.free_pages
        assert all(run.start // 10 == (run.start + run.size - 1) // 10 for runs in taken for run in runs)
    for runs in taken:
        arena.give(runs)
    assert arena._free == [Run(0, 10), Run(10, 10), Run(20, 10), Run(30, 5)]

    fresh = Arena(10, 8, pinned=False)
    monkeypatch.setattr(torch, "empty", lambda *_a, **_k: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(MemoryError, match="cannot grow"):
        fresh.take(3)
    assert fresh.free_pages == 10


class Story(RuleBasedStateMachine):
    """Put, spill, resume, drop, crash and reopen, in any order, against a dictionary."""

    folder: Path
    names = st.integers(0, 5)

    @initialize()
    def start(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        self.rank = Rank(self.folder, pages=20)
        self.rank.disk.begin("life 0")
        self.lives = 0
        self.known: dict[int, tuple[torch.Tensor, bool]] = {}
        """KV by name, and whether it is on disk."""
        self.orders = 0
        self.free = 20

    def _order(self) -> int:
        self.orders += 1
        return self.orders

    def _key(self, name: int) -> Key:
        return Key("run", f"p{name}", 0, 0)

    @rule(name=names, length=st.integers(1, 30), disk=st.booleans(), seed=st.integers(0, 99))
    def put(self, name: int, length: int, disk: bool, seed: int) -> None:
        if name in self.known:
            self.drop(name)
        slots, order = slots_of(length, seed), self._order()
        self.rank.fill(slots)
        if disk:
            self.rank.store.put_on_disk(order, name, slots, self._key(name), 1)
        else:
            self.rank.store.put(order, name, slots, None)
        fits = disk or -(-length // PAGE) <= self.free
        assert (self.rank.outcome(order) == "") == fits
        if fits:
            self.known[name] = (self.rank.rows(slots), disk)
            self.free -= 0 if disk else -(-length // PAGE)

    @rule(name=names)
    def spill(self, name: int) -> None:
        kv, on_disk = self.known.get(name, (None, True))
        if kv is not None and not on_disk:
            order = self._order()
            self.rank.store.spill(order, name, self._key(name), len(kv), 1)
            assert self.rank.outcome(order) == ""
            self.known[name] = (kv, True)
            self.free += -(-len(kv) // PAGE)

    @rule(name=names)
    def get(self, name: int) -> None:
        order = self._order()
        kv = self.known.get(name, (None, True))[0]
        self.rank.store.get(order, name, ELSEWHERE[: len(kv) if kv is not None else 1])
        assert (self.rank.outcome(order) == "") == (kv is not None)
        if kv is not None:
            assert torch.equal(self.rank.rows(ELSEWHERE[: len(kv)]), kv)

    @rule(name=names)
    def drop(self, name: int) -> None:
        kv, on_disk = self.known.pop(name, (None, True))
        self.rank.store.discard(name)
        if kv is not None and not on_disk:
            self.free += -(-len(kv) // PAGE)

    @rule(keep=st.sets(names), spoilt=st.sets(names, max_size=2), older=st.sets(names, max_size=2), lost=st.booleans())
    def crash_and_reopen(self, keep: set[int], spoilt: set[int], older: set[int], lost: bool) -> None:
        """`older`: the journal has another length; `lost`: it went through a life without this directory."""
        self.lives += lost
        self.rank.close()
        self.rank = Rank(self.folder, pages=20)
        self.free = 20
        disk = self.rank.disk
        there = {name: kv for name, (kv, on_disk) in self.known.items() if on_disk}
        spoilt = spoilt & there.keys()
        for name in spoilt:
            path = disk._path(self._key(name))
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        wanted = [(self._key(name), Found(len(there.get(name, "?")) + (name in older), 1)) for name in range(6)]
        said = Search(disk, f"life {self.lives}").look(wanted)
        good = [not lost and name in there and name not in spoilt | older for name in range(6)]
        assert [outcome == "" for outcome in said] == good
        assert [bool(outcome) for outcome in said] == [not lost and name in spoilt for name in range(6)]
        self.lives += 1
        disk.begin(f"life {self.lives}", [self._key(name) for name in keep if good[name]])
        self.known = {name: (kv, True) for name, kv in there.items() if name in keep and good[name]}
        for name, (kv, _) in self.known.items():
            self.rank.store.adopt(name, self._key(name), len(kv))

    @invariant()
    def room_and_files_are_what_they_should_be(self) -> None:
        order = self._order()
        self.rank.store.verify(order)
        assert self.rank.outcome(order) == ""
        assert self.rank.arena.free_pages == self.free
        assert len(list(self.folder.glob("*.kv"))) == sum(on_disk for _, on_disk in self.known.values())

    def teardown(self) -> None:
        if hasattr(self, "rank"):
            self.rank.close()


def test_any_story_of_a_store(tmp_path: Path) -> None:
    """Put, promote, demote, evict, resume, drop, crash, reopen: what the model has comes back bit for bit."""
    machine: Any = type("StoryHere", (Story,), {"folder": tmp_path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
