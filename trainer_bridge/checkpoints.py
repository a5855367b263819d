"""Checkpoints of a run: the trainer's own files and the loop's state, durable once they are in the list.

    SAVE/run.json                  the run's name at the engine, and the policy version of its first weights there
    SAVE/extended.json             prompts that the round since the last checkpoint was extended by
    SAVE/checkpoints/step-000007/  trainer/… and state.json

A checkpoint is written under another name, synced, and renamed: what is in the list is whole.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sglang_april.durable import sync_folder


@dataclass(slots=True)
class LoopState:
    """What the loop knows after a step, beside the trainer."""

    step: int = 0
    """Steps done; 0: none."""
    position: int = 0
    """Prompts taken from the data so far."""
    pending: list[str] = field(default_factory=list)
    """Ids handed over and not delivered, in order."""
    homes: list[int] = field(default_factory=list)
    """The engine of each, if there are several."""
    acknowledged: list[str] = field(default_factory=list)
    """Rounds that are final with this checkpoint, and were not with the one before: acknowledged once it is durable."""
    samples: int = 0
    """Delivered so far, for the plots."""
    seconds: float = 0.0
    """Spent so far, for the plots."""


class Checkpoints:
    """The folder of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._list, self._run = folder / "checkpoints", folder / "run.json"
        self._list.mkdir(parents=True, exist_ok=True)
        for unfinished in self._list.glob("tmp-*"):
            shutil.rmtree(unfinished)

    def run_name(self, first: str) -> str:
        """The run's name: `first` and something that no other run has; the same after every restart."""
        if not self._run.exists():
            _write(self._run, json.dumps({"run": f"{first}-{uuid.uuid4().hex[:8]}", "base_version": 0}))
        return str(json.loads(self._run.read_text())["run"])

    @property
    def base_version(self) -> int:
        """The policy version at the engine is this + steps done; 0 before the first push."""
        return int(json.loads(self._run.read_text())["base_version"])

    def set_base_version(self, version: int) -> None:
        """Remember it before any round is asked for under it."""
        fields = json.loads(self._run.read_text())
        if fields["base_version"] != version:
            _write(self._run, json.dumps(fields | {"base_version": version}))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._list.glob("step-*"))

    def path(self, step: int) -> Path:
        """The folder of one."""
        return self._list / f"step-{step:06d}"

    def save(self, state: LoopState, save_trainer: Callable[[Path], None]) -> None:
        """Write one; when it returns it is durable, and old ones are gone."""
        made = self._list / f"tmp-{state.step:06d}"
        (made / "trainer").mkdir(parents=True)
        save_trainer(made / "trainer")
        _write(made / "state.json", json.dumps(asdict(state)))
        sync_folder(made / "trainer")
        sync_folder(made)
        made.rename(self.path(state.step))
        sync_folder(self._list)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old))

    def newest(self) -> tuple[LoopState, Path] | None:
        """The loop's state and the trainer's folder, or None where there is none."""
        done = self.steps()
        if not done:
            return None
        folder = self.path(done[-1])
        return LoopState(**json.loads((folder / "state.json").read_text())), folder / "trainer"

    def note_extended(self, round_id: str, ids: list[str]) -> None:
        """Before a round is extended: the engine may get these prompts, whether we live on or not."""
        _write(self._folder / "extended.json", json.dumps({"round_id": round_id, "ids": ids}))

    def extended(self, round_id: str) -> list[str]:
        """What a round may have been extended by, before a death."""
        path = self._folder / "extended.json"
        noted = json.loads(path.read_text()) if path.exists() else {}
        return list(noted["ids"]) if noted.get("round_id") == round_id else []


def _write(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    part = path.with_suffix(".tmp")
    with part.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
