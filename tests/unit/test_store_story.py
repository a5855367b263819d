"""Any sequence of page store operations, checked against a dictionary: copies, spills, loads, drops, crashes."""

from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sglang_april.kv.disk_tier import Key
from sglang_april.kv.kv_pages import StoredKv
from sglang_april.recovery.kv_recovery import KvSearch
from tests.unit.rank_store import OTHER_SLOTS, PAGE, RankStore, slots_of


class StoreStory(RuleBasedStateMachine):
    """Copy, spill, load, drop, crash and reopen in any order."""

    folder: Path
    names = st.integers(0, 5)

    @initialize()
    def start(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        self.rank = RankStore(self.folder, pages=20)
        self.rank.disk.begin("epoch 0")
        self.epochs = 0
        self.known: dict[int, tuple[torch.Tensor, bool]] = {}
        """Expected KV by name, and whether it is on disk."""
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
            self.rank.store.copy_to_disk(order, name, slots, self._key(name), 1)
        else:
            self.rank.store.copy_to_host(order, name, slots, None)
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
        self.rank.store.load(order, name, OTHER_SLOTS[: len(kv) if kv is not None else 1])
        assert (self.rank.outcome(order) == "") == (kv is not None)
        if kv is not None:
            assert torch.equal(self.rank.rows(OTHER_SLOTS[: len(kv)]), kv)

    @rule(name=names)
    def drop(self, name: int) -> None:
        kv, on_disk = self.known.pop(name, (None, True))
        self.rank.store.discard(name)
        if kv is not None and not on_disk:
            self.free += -(-len(kv) // PAGE)

    @rule(keep=st.sets(names), spoilt=st.sets(names, max_size=2), older=st.sets(names, max_size=2), lost=st.booleans())
    def crash_and_reopen(self, keep: set[int], spoilt: set[int], older: set[int], lost: bool) -> None:
        """`older`: the journal has another length; `lost`: it went through an epoch without this directory."""
        self.epochs += lost
        self.rank.close()
        self.rank = RankStore(self.folder, pages=20)
        self.free = 20
        disk = self.rank.disk
        there = {name: kv for name, (kv, on_disk) in self.known.items() if on_disk}
        spoilt = spoilt & there.keys()
        for name in spoilt:
            path = disk._path(self._key(name))
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        wanted = [(self._key(name), StoredKv(len(there.get(name, "?")) + (name in older), 1)) for name in range(6)]
        reported = KvSearch(disk, f"epoch {self.epochs}").find_all(wanted)
        good = [not lost and name in there and name not in spoilt | older for name in range(6)]
        assert [outcome == "" for outcome in reported] == good
        assert [bool(outcome) for outcome in reported] == [not lost and name in spoilt for name in range(6)]
        self.epochs += 1
        disk.begin(f"epoch {self.epochs}", [self._key(name) for name in keep if good[name]])
        self.known = {name: (kv, True) for name, kv in there.items() if name in keep and good[name]}
        for name, (kv, _) in self.known.items():
            self.rank.store.register_file(name, self._key(name), len(kv))

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


def test_any_sequence_of_store_operations(tmp_path: Path) -> None:
    """Stored KV is always loaded bit for bit."""
    machine: Any = type("StoryHere", (StoreStory,), {"folder": tmp_path})
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
