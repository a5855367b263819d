"""The order in which a page store executes its orders: loads first, verification last."""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

Act = Callable[[], None]


class OrderCancelledError(Exception):
    """An order that has been cancelled is not carried out, or not to its end."""


class _Order(NamedTuple):
    position: int
    """Position in the order of submission."""
    order: int | None
    """The number under which its outcome is reported; None if it is not reported."""
    number: int
    """The copy that it writes, moves, reads or discards."""
    act: Act


class OrderQueue:
    """Orders of one page store; iterated by its worker thread until it is closed and empty.

    - Orders are executed in the order of their submission.
    - A load overtakes orders of other copies, because a step waits for it, and it allocates nothing: what it needs was
      stored when it was submitted, and an order that frees it comes later.
    - Slices of an idle task run when nothing else waits, and one between two orders, so that the task ends under load.
    - A cancelled order keeps its place: `check_cancelled` raises before its first step, or before the next one.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._positions = itertools.count()
        self._orders: deque[_Order] = deque()
        self._loads: deque[_Order] = deque()
        self._waiting: defaultdict[int, deque[int]] = defaultdict(deque)
        """By copy, the positions of the waiting orders that are not loads."""
        self._idle: tuple[int, Iterator[None]] | None = None
        self._idle_is_due = False
        self._unfinished: set[int] = set()
        """Numbers of the orders that wait or are being executed."""
        self._executing: int | None = None
        self._cancelled: set[int] = set()
        self._closed = False

    def put(self, order: int | None, number: int, act: Act) -> None:
        """Submit an order that is not a load."""
        with self._wake:
            position = next(self._positions)
            self._orders.append(_Order(position, order, number, act))
            self._waiting[number].append(position)
            if order is not None:
                self._unfinished.add(order)
            self._wake.notify_all()

    def put_load(self, order: int, number: int, act: Act) -> None:
        """Submit a load of a copy."""
        with self._wake:
            self._loads.append(_Order(next(self._positions), order, number, act))
            self._unfinished.add(order)
            self._wake.notify_all()

    def put_idle(self, order: int, slices: Iterator[None]) -> None:
        """Submit a task in slices, which ends with its iterator. There must be no other one."""
        with self._wake:
            assert self._idle is None, "two idle tasks"
            self._idle = order, slices
            self._wake.notify_all()

    def wait(self, order: int) -> None:
        """Block until the order has been executed; idle tasks are not waited for."""
        with self._wake:
            self._wake.wait_for(lambda: order not in self._unfinished)

    def cancel(self, order: int) -> None:
        """Skip the order if it has not begun; block until it has ended if it is being executed."""
        with self._wake:
            if order in self._unfinished:
                self._cancelled.add(order)
            self._wake.wait_for(lambda: self._executing != order)

    def check_cancelled(self) -> None:
        """Called by the worker thread before each step of an order.

        Raises:
            OrderCancelledError: the order that is being executed has been cancelled.
        """
        if self._executing in self._cancelled:
            raise OrderCancelledError("the order was cancelled")

    def close(self) -> None:
        """End the iteration when all orders have been executed. An idle task is abandoned."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def __iter__(self) -> Iterator[tuple[int | None, Act]]:
        """(number of the outcome to report, what to do) of each order in turn; blocks while there is none."""
        while True:
            with self._wake:
                self._end_order()
                self._wake.wait_for(lambda: self._orders or self._loads or self._idle or self._closed)
                if self._idle is not None and (self._idle_is_due or not (self._orders or self._loads or self._closed)):
                    chosen = None
                elif self._orders or self._loads:
                    chosen = self._pop()
                    self._executing = chosen.order
                else:
                    return
            self._idle_is_due = chosen is not None
            if chosen is not None:
                yield chosen.order, chosen.act
            elif self._idle is not None:
                yield from self._slice(*self._idle)

    def _end_order(self) -> None:
        """The order that was yielded last has been executed."""
        if self._executing is not None:
            self._unfinished.remove(self._executing)
            self._cancelled.discard(self._executing)
            self._executing = None
            self._wake.notify_all()

    def _slice(self, order: int, slices: Iterator[None]) -> Iterator[tuple[int, Act]]:
        """Run one slice; the end of the task, also by an exception, is a separate order."""
        ended: list[BaseException] = []
        try:
            next(slices)
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - raised again by the order
            ended.append(error)
        else:
            return

        def end() -> None:
            for error in ended:
                raise error

        with self._wake:
            self._idle = None
        yield order, end

    def _pop(self) -> _Order:
        for load in self._loads:
            earlier = self._waiting.get(load.number)
            if not earlier or earlier[0] > load.position:
                self._loads.remove(load)
                return load
        chosen = self._orders.popleft()
        waiting = self._waiting[chosen.number]
        waiting.popleft()
        if not waiting:
            del self._waiting[chosen.number]
        return chosen
