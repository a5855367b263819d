"""The files of the disk tier: failed writes, the directory's lock, and what a restart may use."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_april.kv.disk_tier import DiskError, DiskTier, Key
from sglang_april.kv.kv_pages import StoredKv
from sglang_april.recovery.kv_recovery import KvSearch
from tests.unit.rank_store import KEY, OTHER_SLOTS, PAGE, RankStore, slots_of


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[RankStore]:
    rank = RankStore(tmp_path)
    yield rank
    rank.close()


class Faulty:
    """`os.write` that fails or writes only part of its data from the second call on."""

    def __init__(self, fault: int | str) -> None:
        self.fault, self.calls = fault, 0

    def __call__(self, fd: int, data: memoryview) -> int:
        self.calls += 1
        if self.calls > 1 and isinstance(self.fault, int):
            raise OSError(self.fault, os.strerror(self.fault))
        return os.write(fd, data[: max(1, len(data) // 2)] if self.fault == "short" else data)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("route", ["disk", "spilled"])
def test_failed_write_loses_only_that_copy(tmp_path: Path, fault: int, route: str) -> None:
    """No partial file is left, the host pages are free again, and the store keeps working."""
    rank = RankStore(tmp_path, write=Faulty(fault))
    slots = slots_of(9)
    if route == "disk":
        rank.store.copy_to_disk(1, 7, slots, KEY, 0)
    else:
        rank.store.copy_to_host(0, 7, slots, None)
        rank.store.spill(1, 7, KEY, 9, 0)
    assert os.strerror(fault) in rank.outcome(1)
    rank.store.load(2, 7, OTHER_SLOTS[:9])
    assert "never stored" in rank.outcome(2)
    assert [p.name for p in tmp_path.iterdir()] == ["lock.r0"]
    assert rank.arena.free_pages == 64
    rank.store.copy_to_host(3, 8, slots, None)
    assert rank.outcome(3) == ""
    rank.close()


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError("no reason")])
@pytest.mark.parametrize("route", ["disk", "spilled"])
def test_failed_write_frees_host_pages_once(tmp_path: Path, error: Exception, route: str) -> None:
    """Pages freed twice would hold two copies; a partial file would stay until the next start."""

    def refuse(fd: int, data: memoryview) -> int:
        raise error

    rank = RankStore(tmp_path, write=refuse)
    if route == "disk":
        rank.store.copy_to_disk(1, 7, slots_of(9), KEY, 0)
    else:
        rank.store.copy_to_host(0, 7, slots_of(9), None)
        rank.store.spill(1, 7, KEY, 9, 0)
    assert str(error) in rank.outcome(1)
    rank.store.discard(7)
    rank.store.verify(2)
    assert rank.outcome(2) == ""
    assert rank.arena.free_pages == 64
    assert [p.name for p in tmp_path.iterdir()] == ["lock.r0"]
    rank.close()


def test_short_writes_are_continued(tmp_path: Path) -> None:
    rank = RankStore(tmp_path, write=Faulty("short"))
    rank.store.copy_to_disk(1, 7, slots_of(9), KEY, 0)
    rank.store.load(2, 7, OTHER_SLOTS[:9])
    assert (rank.outcome(1), rank.outcome(2)) == ("", "")
    assert torch.equal(rank.rows(OTHER_SLOTS[:9]), rank.rows(slots_of(9)))
    rank.close()


def test_missing_directory_fails_the_order(rank: RankStore, tmp_path: Path) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    rank.store.copy_to_disk(1, 7, slots_of(9), KEY, 0)
    assert "No such file" in rank.outcome(1)
    tmp_path.mkdir()
    rank.store.copy_to_disk(2, 7, slots_of(9), KEY, 0)
    assert rank.outcome(2) == ""


def test_directory_is_locked_by_one_server(rank: RankStore, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="in use by another server"):
        DiskTier(tmp_path, 0, "layout", PAGE, 8)
    with pytest.raises(DiskError, match="cannot be used"):
        DiskTier(tmp_path / "missing", 0, "layout", PAGE, 8)


def test_a_start_with_fewer_ranks_removes_the_files_of_the_others(tmp_path: Path) -> None:
    """No rank of the new server owns them, so they would take space beyond `--april-disk-gb` for ever."""
    pages = [(torch.zeros(1, 8, dtype=torch.int32), None)]
    for number in range(4):
        earlier = DiskTier(tmp_path, number, "layout", PAGE, 8, ranks=4)
        earlier.save(KEY, PAGE, 0, pages)
        earlier.close()
    (tmp_path / "notes.r1.kv").touch()
    removed = [DiskTier(tmp_path, number, "layout", PAGE, 8, ranks=2).begin("next") for number in range(2)]
    assert removed == [3, 1]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".kv") == ["notes.r1.kv"]


def test_a_rank_of_a_server_on_two_machines_keeps_its_files(tmp_path: Path) -> None:
    """Its rank 0 is on the other machine, so that the lock of rank 0 is free here."""
    pages = [(torch.zeros(1, 8, dtype=torch.int32), None)]
    second = DiskTier(tmp_path, 1, "layout", PAGE, 8, ranks=2)
    second.save(KEY, PAGE, 0, pages)
    other = DiskTier(tmp_path, 0, "layout", PAGE, 8)
    with pytest.raises(DiskError, match="in use by another server"):
        other.begin("next")
    assert second._path(KEY).exists()
    second.close()
    assert other.begin("next") == 1
    other.close()


@pytest.mark.parametrize("fault", ["none", "bit", "short", "empty", "header", "model", "missing", "older", "version"])
def test_restart_finds_matching_kv_or_reports_why_not(tmp_path: Path, fault: str) -> None:
    """A file is used only if it is intact and holds the journal's tokens; others are removed (`verified-pages`)."""
    first = RankStore(tmp_path)
    wanted = first.rows(slots_of(9))
    first.store.copy_to_disk(1, 7, slots_of(9), KEY, 3)
    first.store.copy_to_disk(2, 8, slots_of(9), Key("run", "other", 0, 0), 3)
    assert (first.outcome(1), first.outcome(2)) == ("", "")
    first.disk.begin("epoch", [KEY, Key("run", "other", 0, 0)])
    first.close()
    again = RankStore(tmp_path)
    disk = again.disk
    (tmp_path / f"{32 * 'a'}.r0.part").write_bytes(b"half")
    spoil(disk, fault)
    search = KvSearch(disk, "epoch")
    (outcome,) = search.find_all([(KEY, StoredKv(9 + (fault == "older"), 3 - (fault == "version")))])
    assert outcome == {"none": "", "missing": None, "older": None, "version": None}.get(fault, outcome)
    assert outcome != "" or fault == "none"
    assert search.bytes_read == (disk._path(KEY).stat().st_size if fault == "none" else 0)
    disk.begin("next", [KEY] if outcome == "" else [])
    assert sorted(p.suffix for p in tmp_path.iterdir()) == ([".kv", ".r0"] if fault == "none" else [".r0"])
    if outcome == "":
        again.store.register_file(20, KEY, 9)
        again.store.load(1, 20, OTHER_SLOTS[:9])
        assert again.outcome(1) == ""
        assert torch.equal(again.rows(OTHER_SLOTS[:9]), wanted)
    again.close()


def spoil(disk: DiskTier, fault: str) -> None:
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


@pytest.mark.parametrize("epoch", ["", "another", "epo", "epoch and more"])
def test_files_of_another_epoch_are_ignored(rank: RankStore, epoch: str) -> None:
    """Without a journal there is no epoch, and the files of another history prove nothing."""
    rank.disk.begin("a much longer name than the next")
    rank.disk.begin(epoch)
    rank.store.copy_to_disk(1, 7, slots_of(9), KEY, 3)
    assert rank.outcome(1) == ""
    assert rank.disk.epoch == epoch
    assert KvSearch(rank.disk, "epoch").find_all([(KEY, StoredKv(9, 3))]) == [None]
    assert KvSearch(rank.disk, "").find_all([(KEY, StoredKv(9, 3))]) == [None]
    rank.disk.begin("epoch", [KEY])
    assert KvSearch(rank.disk, "epoch").find_all([(KEY, StoredKv(9, 3))]) == [""]


def test_undeletable_stale_file_stops_the_start(
    rank: RankStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the file would belong to the next epoch; the previous epoch stays recorded."""
    rank.disk.begin("before")
    rank.store.copy_to_disk(1, 7, slots_of(9), KEY, 3)
    assert rank.outcome(1) == ""

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DiskError, match=f"{tmp_path} cannot be used: Operation not permitted"):
        rank.disk.begin("next")
    assert rank.disk.epoch == "before"
