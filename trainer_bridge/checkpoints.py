"""Checkpoints of a run: the trainer's files and the state of the loop.

    SAVE/run.json                  the run's name at the engine, and the bases of its policy versions
    SAVE/extended.json             prompts that rounds since the last checkpoint were extended by
    SAVE/resent.json               prompts that they sent again, to engines that did not have them any more
    SAVE/further_rounds.json       quotas of further rounds of the steps since then, after the step's first one
    SAVE/checkpoints/step-000007/  trainer/… and state.json

A checkpoint is written under a temporary name, synced and renamed, so a listed checkpoint is complete and durable.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_april.durable import sync_folder


@dataclass(slots=True)
class LoopState:
    """The state of the training loop after a step."""

    step: int = 0
    """Completed steps."""
    position: int = 0
    """Prompts taken from the data so far."""
    pending: list[str] = field(default_factory=list)
    """Ids of the prompts in the pool, in order."""
    pending_engines: list[int] = field(default_factory=list)
    """Index of the engine of each."""
    acknowledged: list[str] = field(default_factory=list)
    """Rounds and evaluations that this checkpoint makes final; they are acknowledged once it is durable."""
    samples: int = 0
    """Delivered samples so far, for the plots."""
    seconds: float = 0.0
    """Duration of all steps so far, for the plots."""


class Checkpoints:
    """The checkpoints in the folder of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep`: how many checkpoints are kept."""
        self._folder, self._keep = folder, keep
        self._checkpoints, self._run = folder / "checkpoints", folder / "run.json"
        self._extended, self._resent = folder / "extended.json", folder / "resent.json"
        self._further = folder / "further_rounds.json"
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        for unfinished in self._checkpoints.glob("tmp-*"):
            shutil.rmtree(unfinished)

    def run_name(self, prefix: str) -> str:
        """The run's unique name, which begins with `prefix`; a restart does not change it."""
        if not self._run.exists():
            name = f"{prefix}-{uuid.uuid4().hex[:8]}"
            write_atomically(self._run, json.dumps({"run": name, "base_versions": [[0, 0]]}))
        return str(json.loads(self._run.read_text())["run"])

    def base_version(self, step: int) -> int:
        """The engines' policy version minus completed steps, after this step; 0 before the first push."""
        bases = json.loads(self._run.read_text())["base_versions"]
        return int(next(base for first, base in reversed(bases) if first <= step))

    def set_base_version(self, step: int, version: int) -> None:
        """Store it, before any round under it. Earlier steps, which a resumed run repeats, keep theirs."""
        fields = json.loads(self._run.read_text())
        bases = [[first, base] for first, base in fields["base_versions"] if first <= step]
        if bases[-1][1] != version:
            bases.append([step, version])
        if bases != fields["base_versions"]:
            write_atomically(self._run, json.dumps(fields | {"base_versions": bases}))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in ascending order."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._checkpoints.glob("step-*"))

    def path(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self._checkpoints / f"step-{step:06d}"

    def save(self, state: LoopState, save_trainer: Callable[[Path], None]) -> None:
        """Write a checkpoint, which is durable on return, and delete old ones."""
        folder = self._checkpoints / f"tmp-{state.step:06d}"
        (folder / "trainer").mkdir(parents=True)
        save_trainer(folder / "trainer")
        write_atomically(folder / "state.json", json.dumps(asdict(state)))
        sync_folder(folder / "trainer")
        sync_folder(folder)
        folder.rename(self.path(state.step))
        sync_folder(self._checkpoints)
        for notes in (self._extended, self._resent, self._further):
            notes.unlink(missing_ok=True)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old))

    def newest(self) -> tuple[LoopState, Path] | None:
        """The loop's state and the trainer's folder of the newest checkpoint; None if there is none."""
        steps = self.steps()
        if not steps:
            return None
        folder = self.path(steps[-1])
        return LoopState(**json.loads((folder / "state.json").read_text())), folder / "trainer"

    def note_extended(self, round_id: str, ids: list[str]) -> None:
        """Store the extensions of a round before they are sent, because the trainer may die in between.

        They are kept until the next checkpoint: until then, a resumed run repeats the round.
        """
        _note(self._extended, round_id, ids)

    def extended(self, round_id: str) -> list[str]:
        """Ids of the prompts that a round may have been extended by."""
        return _noted(self._extended).get(round_id, [])

    def note_resent(self, round_id: str, ids: list[str]) -> None:
        """Store which prompts of the pool a request sends again, before it is sent: a repeated one must be identical,
        and then the engine has them. They are kept as extensions are."""
        _note(self._resent, round_id, ids)

    def resent(self, round_id: str) -> list[str]:
        """Ids of the prompts of the pool that a round may have sent again."""
        return _noted(self._resent).get(round_id, [])

    def note_further_rounds(self, round_id: str, quotas: list[int]) -> None:
        """Store the quotas of the rounds that complete the step of a round, each before it is opened."""
        _note(self._further, round_id, quotas)

    def further_rounds(self, round_id: str) -> list[int]:
        """The quotas of the rounds that may have completed the step of a round."""
        return _noted(self._further).get(round_id, [])


def _note(path: Path, round_id: str, values: Sequence[str | int]) -> None:
    write_atomically(path, json.dumps(_noted(path) | {round_id: values}))


def _noted(path: Path) -> dict[str, list[Any]]:
    """By round."""
    found: dict[str, list[Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole; the text is durable on return."""
    part = path.with_suffix(".tmp")
    with part.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
