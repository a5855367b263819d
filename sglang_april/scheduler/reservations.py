"""Claims on slots, device memory and prefills that last beyond one scheduling step (`fair-slots`).

Each step is decided from scratch. Without these claims, two parties could take the same resource from each other in
every step, and neither would make progress:

- `loading`: a sample that has a slot keeps the device pages that are loaded for it. Memory for a request that waits for
  a prefill comes from other partials; otherwise the sample and the request could evict each other's memory endlessly.
- `hold_turn`: while such a sample waits for its pages or for memory, its run stays first in the round-robin order;
  otherwise two runs could load into each other's memory endlessly.
- `owe_prefill`: samples that join the batch as decode rows leave no room for a prefill in that step. The next such step
  belongs to the request that waits for a prefill.
- `rollout_slots`: a single free slot alternates between rollouts and stock requests; of several, each side gets some.

Loading ahead of a slot makes no claim: it uses spare memory while nothing else waits, and is cancelled first.
"""

from collections.abc import Collection, Sequence

from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Sample


class Reservations:
    """The claims on one scheduler, the same on every rank."""

    def __init__(self) -> None:
        self.loading: Sequence[Sample] = ()
        """Samples that have a slot, and whose pages are being loaded or have just been loaded."""
        self.turn: Run | None = None
        """The run that is first again in the next choice of samples; None: the runs rotate."""
        self.prefill_owed = False
        """True after samples joined the batch instead of a prefill, until a prefill could be launched."""
        self.stock_turn = False
        """In this step, the only free slot is for a stock request."""
        self._last_slot_to_rollouts = False

    # --- device memory

    def reserve_loading(self, loading: list[Sample], waiting: Collection[Sample]) -> None:
        """Reserve memory for `loading`, and keep earlier reservations of samples that are still `waiting` to join."""
        self.loading = [*loading, *(s for s in self.loading if s in waiting and s not in loading)]

    def release_loading(self) -> None:
        self.loading = ()

    # --- the round-robin order of the runs

    def hold_turn(self, sample: Sample) -> None:
        """The sample has a slot and waits: its run is first again in the next step."""
        self.turn = sample.group.run

    def end_turn(self) -> None:
        self.turn = None

    # --- prefills

    def owe_prefill(self) -> None:
        """Samples have joined the batch instead of a prefill."""
        self.prefill_owed = True

    def prefill_served(self) -> None:
        """A prefill can be launched in this step."""
        self.prefill_owed = False

    # --- slots

    def rollout_slots(self, free: int, foreign_waiting: int) -> int:
        """How many of the free slots rollouts may take while stock requests wait for one."""
        self.stock_turn = False
        if free <= 0 or not foreign_waiting:
            return free
        if free == 1:
            self._last_slot_to_rollouts = not self._last_slot_to_rollouts
            self.stock_turn = not self._last_slot_to_rollouts
            return int(self._last_slot_to_rollouts)
        return free - min(foreign_waiting, free // 2)
