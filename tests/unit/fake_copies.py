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
    order: int
    """-1: its end is not reported."""
    number: int
    """The copy."""
    loads: bool
    act: Callable[[], str]
    """Carries the order out; returns why it failed, or an empty string."""
    due: int
    failure: str | None = None
    """None until it is carried out."""


class Copies:
    """Carries out orders as late as it may, each at most `delay` steps after it was given, in the sequence of the page
    store (`OrderQueue`): loads overtake orders of other copies. Every `fail_every`-th order fails (0: none).
    """

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
        """Copies whose discard is ordered."""

    def put(self, order: int, pages: Pages, key: SampleKey, version: int, history: list[Any]) -> None:
        number, tier, slots = pages.copy.number, pages.copy.tier, list(pages.slots)
        self._key[number] = key, File(StoredKv(pages.length, version), [], history)

        def act() -> str:
            # Read now instead of at the order, so that a slot reused meanwhile is detected.
            self.held[number] = [self.engine.cells[slot] for slot in slots]
            if tier == "disk":
                self._write(number)
            return ""

        self._give(order, number, act)

    def get(self, order: int, pages: Pages) -> None:
        number, slots = pages.copy.number, list(pages.slots)

        def act() -> str:
            if number not in self.held:
                return "lost"
            for slot, cell in zip(slots, self.held[number], strict=True):
                self.engine.cells[slot] = cell
            return ""

        self._give(order, number, act, loads=True)

    def spill(self, order: int, pages: Pages) -> None:
        number = pages.copy.number

        def act() -> str:
            if number not in self.held:
                return "lost"
            self._write(number)
            return ""

        self._give(order, number, act)

    def report(self, order: int) -> None:
        self._give(order, -1, lambda: "")

    def cancel(self, order: int) -> None:
        """Skip the order unless it has been carried out; here no order takes time."""
        for given in self._orders:
            if given.order == order and given.failure is None:
                given.failure = ""

    def discard(self, number: int) -> None:
        def act() -> str:
            self.held.pop(number, None)
            if number in self.on_disk:
                self.on_disk.discard(number)
                self.folder.remove(self._key[number][0])
            return ""

        self._discarded.add(number)
        self._give(-1, number, act)

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
        for _ in range(orders):
            if any(given.failure is None for given in self._orders):
                self._act_next()

    def carry_out(self, order: int) -> None:
        """Carry out all orders up to this one."""
        while not self.has_ended(order):
            self._act_next()

    def has_ended(self, order: int) -> bool:
        return all(given.failure is not None for given in self._orders if given.order == order)

    def unreported_failure(self) -> bool:
        """Whether an order has failed whose message is not sent yet."""
        return any(order.failure for order in self._orders)

    def remaining(self) -> set[int]:
        """Copies that remain when all orders are carried out."""
        return self.held.keys() - self._discarded

    def end_of_step(self) -> messages.Moved | None:
        """The message that rank 0 broadcasts before the next step."""
        self._step += 1
        due = [given for given in self._orders if given.due <= self._step]
        while any(given.failure is None for given in due):
            self._act_next()
        del self._orders[: len(due)]
        failed = {given.order: given.failure for given in due if given.order >= 0 and given.failure}
        done = [given.order for given in due if given.order >= 0 and not given.failure]
        return messages.Moved(done, failed) if due else None

    def _give(self, order: int, number: int, act: Callable[[], str], *, loads: bool = False) -> None:
        self._orders.append(StartedCopy(order, number, loads, act, self._step + 1 + self._delay))

    def _act_next(self) -> None:
        waiting = [given for given in self._orders if given.failure is None]
        of_copies: set[int] = set()
        chosen = waiting[0]
        for given in waiting:
            if given.loads and given.number not in of_copies:
                chosen = given
                break
            of_copies.add(given.number)
        fails = self._fail_every and chosen.order >= 0 and chosen.order % self._fail_every == 0
        chosen.failure = "injected" if fails else chosen.act()
