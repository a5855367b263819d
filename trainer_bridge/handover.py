"""The phases of a step in which engines and trainer take turns on the memory of their GPUs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer_bridge.config import Config
from trainer_bridge.rollout_engine import RolloutEngines
from trainer_bridge.trainer import PARTS, Part, Trainer


class PhaseTimes:
    """Seconds of the current step by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to the phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, time.monotonic() - started)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


class Handover:
    """Gives the GPUs to the trainer for its step, and back to the engines with the new weights.

    Only a colocated run shares them; in any other, this just pushes.
    """

    def __init__(
        self,
        config: Config,
        engines: RolloutEngines,
        trainer: Trainer,
        times: PhaseTimes,
        with_engines: Callable[[Callable[[], None]], None],
    ) -> None:
        """`with_engines` makes a call that is repeated if an engine is lost."""
        self._config, self._engines, self._trainer = config, engines, trainer
        self._times, self._with_engines = times, with_engines

    def to_trainer(self) -> None:
        """Free the engines' memory, and allocate the trainer's."""
        if self._config.colocate:
            with self._times.timed("colocate_release"):
                self._with_engines(self._engines.release)
        if self._config.offloads:
            with self._times.timed("colocate_onload"):
                self._trainer.onload(*PARTS)

    def to_engines(self, push: Callable[[], None]) -> None:
        """Push the weights. A colocated engine allocates its weights before the push, and its KV pool after it.

        The trainer frees memory for both: that of the optimiser before the weights, all of it before the KV pool.
        """
        self._offload("optimizer")
        self._resume("colocate_weights", "weights")
        with self._times.timed("push"):
            self._with_engines(push)
        self._offload("weights")
        self._resume("colocate_kv", "kv_cache", "cuda_graph")

    def _offload(self, part: Part) -> None:
        if self._config.offloads:
            with self._times.timed("colocate_offload"):
                self._trainer.offload(part)

    def _resume(self, phase: str, *tags: str) -> None:
        if self._config.colocate:
            with self._times.timed(phase):
                self._with_engines(lambda: self._engines.resume(*tags))
