"""An in-memory page store of one rank: copies take steps to complete, and fail where a test asks for it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from sglang_april.api import messages
from sglang_april.kv.kv_pages import Pages, StoredKv

Cells = list[tuple[str, int, int] | None]
SampleKey = tuple[str, str, int, int]
"""Identity of a sample: run, prompt id, incarnation, index."""


@dataclass(eq=False, slots=True)
class File:
    """A file of the disk tier: header, pages, and the history of its output tokens, which only checks read."""

    found: StoredKv
    cells: Cells
    history: list[Any]
    sound: bool = True


@dataclass(eq=False, slots=True)
class Folder:
    """A rank's directory, which outlives its server; searched like `DiskTier`."""

    files: dict[SampleKey, File] = field(default_factory=dict)
    epoch: str = ""

    def find(self, key: SampleKey, wanted: StoredKv) -> int:
        file = self.files.get(key)
        if file is None or file.found != wanted:
            return 0
        if not file.sound:
            raise OSError("flipped")
        return 1

    def write(self, key: SampleKey, file: File) -> None:
        self.files[key] = file

    def read(self, key: SampleKey, _length: int) -> File:
        return self.files[key]

    def remove(self, key: SampleKey) -> None:
        self.files.pop(key, None)

    def begin(self, epoch: str, keep: Collection[SampleKey]) -> None:
        self.files = {key: file for key, file in self.files.items() if key in keep}
        self.epoch = epoch


@dataclass(eq=False, slots=True)
class StartedCopy:
    number: int
    act: Callable[[], str]
    """Carries the order out; returns why it failed, or an empty string."""
    due: int
    failure: str | None = None
    """None until it is carried out."""


class Copies:
    """Carries out orders in sequence, each `delay` steps after it was given; every `fail_every`-th fails (0: none)."""

    def __init__(self, delay: int = 0, fail_every: int = 0) -> None:
        self.engine: Any = None
        self.held: dict[int, Cells] = {}
        self.on_disk: set[int] = set()
        self.folder: Any = Folder()
        self._key: dict[int, tuple[SampleKey, File]] = {}
        """Per copy, the sample and the file that it is or would be."""
        self._delay, self._fail_every = delay, fail_every
        self._orders: list[StartedCopy] = []
        self._step = 0
        self._discarded: set[int] = set()

    def put(self, order: int, pages: Pages, key: SampleKey, version: int, history: list[Any]) -> None:
        number, tier, slots = pages.copy.number, pages.copy.tier, list(pages.slots)
        self._key[number] = key, File(StoredKv(pages.length, version), [], history)

        def act() -> str:
            # Read now instead of at the order, so that a slot reused meanwhile is detected.
            self.held[number] = [self.engine.cells[slot] for slot in slots]
            if tier == "disk":
                self._write(number)
            return ""

        self._give(order, act)

    def get(self, order: int, pages: Pages) -> None:
        number, slots = pages.copy.number, list(pages.slots)

        def act() -> str:
            if number not in self.held:
                return "lost"
            for slot, cell in zip(slots, self.held[number], strict=True):
                self.engine.cells[slot] = cell
            return ""

        self._give(order, act)

    def spill(self, order: int, pages: Pages) -> None:
        number = pages.copy.number

        def act() -> str:
            if number not in self.held:
                return "lost"
            self._write(number)
            return ""

        self._give(order, act)

    def report(self, order: int) -> None:
        self._give(order, lambda: "")

    def discard(self, number: int) -> None:
        def act() -> str:
            self.held.pop(number, None)
            if number in self.on_disk:
                self.on_disk.discard(number)
                self.folder.remove(self._key[number][0])
            return ""

        self._discarded.add(number)
        self._give(-1, act)

    def _write(self, number: int) -> None:
        self.on_disk.add(number)
        key, file = self._key[number]
        file.cells = self.held[number]
        self.folder.write(key, file)

    def recover(self, number: int, key: SampleKey, length: int) -> None:
        """Register a file that a search found as the copy of this number."""
        file = self.folder.read(key, length)
        self._key[number] = key, file
        self.held[number] = file.cells
        self.on_disk.add(number)

    def carry_out_first(self, orders: int) -> None:
        """Carry out only the first orders, as a worker whose process is killed."""
        for order in self._orders[:orders]:
            self._act(order)

    def carry_out(self, number: int) -> None:
        """Carry out all orders up to this one."""
        if any(o.number == number for o in self._orders):
            for order in self._orders:
                self._act(order)
                if order.number == number:
                    return

    def is_carried_out(self, number: int) -> bool:
        return all(o.failure is not None for o in self._orders if o.number == number)

    def unreported_failure(self) -> bool:
        """Whether an order has failed whose message is not sent yet."""
        return any(order.failure for order in self._orders)

    def remaining(self) -> set[int]:
        """Copies that remain when all orders are carried out."""
        return self.held.keys() - self._discarded

    def end_of_step(self) -> messages.Moved | None:
        """The message that rank 0 broadcasts before the next step."""
        self._step += 1
        done, failed = [], {}
        while self._orders and self._orders[0].due <= self._step:
            order = self._orders.pop(0)
            self._act(order)
            if order.number >= 0:
                if order.failure:
                    failed[order.number] = order.failure
                else:
                    done.append(order.number)
        return messages.Moved(done, failed) if done or failed else None

    def _give(self, number: int, act: Callable[[], str]) -> None:
        self._orders.append(StartedCopy(number, act, self._step + 1 + self._delay))

    def _act(self, order: StartedCopy) -> None:
        if order.failure is None:
            fails = self._fail_every and order.number >= 0 and order.number % self._fail_every == 0
            order.failure = "injected" if fails else order.act()
