"""Checkpoints: atomicity, retention, and the state that a crash leaves."""

from pathlib import Path

import pytest

from trainer_bridge.checkpoints import Checkpoints, LoopState


def write_weights(folder: Path) -> None:
    (folder / "weights").write_text("w")


def test_newest_checkpoint_is_loaded_and_old_ones_are_deleted(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.save(LoopState(step=step, position=4 * step, pending=["e0-1"]), write_weights)
    assert store.steps() == [2, 10]
    newest = Checkpoints(tmp_path, keep=2).newest()
    assert newest is not None
    state, trainer = newest
    assert (state.step, state.position, state.pending) == (10, 40, ["e0-1"])
    assert (trainer / "weights").read_text() == "w"


def test_unfinished_checkpoint_is_ignored(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    store.save(LoopState(step=1), write_weights)

    def crash(folder: Path) -> None:
        write_weights(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(LoopState(step=2), crash)
    again = Checkpoints(tmp_path, keep=2)
    assert again.steps() == [1]
    again.save(LoopState(step=2), write_weights)
    assert again.steps() == [1, 2]


def test_run_name_is_stable(tmp_path: Path) -> None:
    name = Checkpoints(tmp_path, 1).run_name("a")
    assert name.startswith("a-")
    assert Checkpoints(tmp_path, 1).run_name("b") == name
    assert Checkpoints(tmp_path / "other", 1).run_name("a") != name


def test_base_version_is_stored_from_a_step_on(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1)
    name = store.run_name("a")
    assert store.base_version(0) == 0
    for step, base in ((0, 7), (1, 7), (5, 8), (9, 10)):
        store.set_base_version(step, base)
    again = Checkpoints(tmp_path, 1)
    assert [again.base_version(step) for step in (0, 4, 5, 8, 9, 99)] == [7, 7, 8, 8, 10, 10]
    assert again.run_name("a") == name
    again.set_base_version(6, 20)  # the engines have nothing later
    assert [again.base_version(step) for step in (4, 5, 6, 9)] == [7, 8, 20, 20]


def test_extensions_are_stored_per_round(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1)
    assert store.extended("r.1") == []
    store.note_extended("r.1", ["e0-5", "e0-6"])
    assert Checkpoints(tmp_path, 1).extended("r.1") == ["e0-5", "e0-6"]
    assert store.extended("r.2") == []


def test_notes_about_rounds_are_kept_until_the_next_checkpoint(tmp_path: Path) -> None:
    """A run that is resumed after a checkpoint repeats all rounds since then."""
    store = Checkpoints(tmp_path, 1)
    store.note_extended("r.1", ["e0-5"])
    store.note_extended("r.2", ["e0-9"])
    store.note_resent("r.2", ["e0-1"])
    assert (store.extended("r.1"), store.extended("r.2")) == (["e0-5"], ["e0-9"])
    assert (Checkpoints(tmp_path, 1).resent("r.1"), Checkpoints(tmp_path, 1).resent("r.2")) == ([], ["e0-1"])
    store.note_further_rounds("r.2", [3, 1])
    assert Checkpoints(tmp_path, 1).further_rounds("r.2") == [3, 1]
    store.save(LoopState(step=2), lambda _folder: None)
    assert (store.extended("r.1"), store.extended("r.2"), store.resent("r.2")) == ([], [], [])
    assert store.further_rounds("r.2") == []
