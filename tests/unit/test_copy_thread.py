"""The thread that copies pages uses the rank's own GPU for everything it does, from its first call on."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_april.kv.copiers import CpuCopier, GpuCopier
from tests.unit.rank_store import KEY, RankStore, slots_of

DEVICE = torch.device("cuda", 1)


class Devices(threading.local):
    """The current CUDA device of each thread, which begins as 0."""

    current = 0


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """By thread: the devices on which it copied. Pages are copied on the CPU; devices are a GPU rank's."""
    devices, used = Devices(), dict[str, set[int]]()
    copy = CpuCopier.gather

    def gather(copier: Any, *args: Any) -> Any:
        used.setdefault(threading.current_thread().name, set()).add(devices.current)
        return copy(copier, *args)

    def enter_thread(_copier: Any) -> None:
        gpu = GpuCopier.__new__(GpuCopier)
        gpu._device = DEVICE
        gpu.enter_thread()

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(devices, "current", device.index))
    monkeypatch.setattr(CpuCopier, "enter_thread", enter_thread)
    monkeypatch.setattr(CpuCopier, "gather", gather)
    return used


def test_copies_use_the_device_of_the_pool(used: dict[str, set[int]], tmp_path: Path) -> None:
    rank = RankStore(tmp_path)
    rank.store.copy_to_host(1, 7, slots_of(5), None)
    rank.store.copy_to_disk(2, 8, slots_of(5), KEY, 0)
    assert (rank.outcome(1), rank.outcome(2)) == ("", "")
    rank.close()
    assert used == {"april-store": {DEVICE.index}}
