"""The prompts of a run that are at its engines: sent, and not yet fully delivered."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trainer_bridge.data import PromptData
from trainer_bridge.rewards import TrainingPrompt


class PromptPool:
    """Undelivered prompts and the engine of each, in the order in which they were drawn. Safe for several threads."""

    def __init__(self, data: PromptData, engines: int = 1) -> None:
        self._data, self.engines = data, engines
        self.prompts: dict[str, TrainingPrompt] = {}
        self.engine_of: dict[str, int] = {}
        """Index of the engine that each prompt was sent to."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def position(self) -> int:
        """Prompts taken from the data so far."""
        return self._data.position

    def restore(self, ids: Sequence[str], engines: Sequence[int] = ()) -> None:
        """Set the contents, from a checkpoint."""
        self.prompts = {prompt_id: self._data.find(prompt_id) for prompt_id in ids}
        self.engine_of = dict(zip(ids, engines or [0] * len(ids), strict=True))

    def draw(self, count: int) -> list[TrainingPrompt]:
        """Take the next prompts of the data, each for the engine with the fewest prompts.

        The assignment depends on the pool's contents only, so that a repeated round makes the same one.
        """
        with self._lock:
            drawn = self._data.take(count)
            self._assign([prompt.id for prompt in drawn])
            self.prompts |= {prompt.id: prompt for prompt in drawn}
            return drawn

    def reassign(self) -> set[str]:
        """Give the prompts of engines that the run no longer has to others, as `draw` does. Returns their ids."""
        with self._lock:
            moved = [prompt_id for prompt_id, engine in self.engine_of.items() if engine >= self.engines]
            self._assign(moved)
            return set(moved)

    def _assign(self, prompt_ids: Iterable[str]) -> None:
        load = Counter(self.engine_of.values())
        for prompt_id in prompt_ids:
            engine = self.engine_of[prompt_id] = min(range(self.engines), key=lambda engine: load[engine])
            load[engine] += 1

    def undo_draw(self, prompt: TrainingPrompt) -> None:
        """Give the prompt that was drawn last back to the data."""
        with self._lock:
            self._remove(prompt.id)
            self._data.position -= 1

    def remove(self, prompt_id: str) -> None:
        """Remove a prompt that was delivered or dropped."""
        with self._lock:
            self._remove(prompt_id)

    def _remove(self, prompt_id: str) -> None:
        self.prompts.pop(prompt_id, None)
        self.engine_of.pop(prompt_id, None)

    def body(self, prompt: TrainingPrompt, n: int) -> dict[str, Any]:
        """The prompt as a request has it, with `n` samples and, for `EnginePool`, its engine."""
        body = prompt.body(n)
        return body if self.engines == 1 else {**body, "engine": self.engine_of[prompt.id]}

    def find(self, prompt_id: str) -> TrainingPrompt:
        """A prompt by id, whether it is in the pool or not."""
        return self.prompts.get(prompt_id) or self._data.find(prompt_id)

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Undo all changes to the pool and to the position in the data if the block raises."""
        prompts, engine_of, position = dict(self.prompts), dict(self.engine_of), self._data.position
        try:
            yield
        except BaseException:
            self.prompts, self.engine_of, self._data.position = prompts, engine_of, position
            raise
