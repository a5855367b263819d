"""Checkpoints: whole or not there, the last few, and what a death leaves."""

from pathlib import Path

import pytest

from trainer_bridge.checkpoints import Checkpoints, LoopState


def write_weights(folder: Path) -> None:
    (folder / "weights").write_text("w")


def test_the_newest_comes_back_and_old_ones_go(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.save(LoopState(step=step, position=4 * step, pending=["e0-1"]), write_weights)
    assert store.steps() == [2, 10]
    found = Checkpoints(tmp_path, keep=2).newest()
    assert found is not None
    state, trainer = found
    assert (state.step, state.position, state.pending) == (10, 40, ["e0-1"])
    assert (trainer / "weights").read_text() == "w"


def test_a_checkpoint_that_was_not_finished_is_none(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    store.save(LoopState(step=1), write_weights)

    def dies(folder: Path) -> None:
        write_weights(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(LoopState(step=2), dies)
    again = Checkpoints(tmp_path, keep=2)
    assert again.steps() == [1]
    again.save(LoopState(step=2), write_weights)
    assert again.steps() == [1, 2]


def test_a_runs_name_is_made_once(tmp_path: Path) -> None:
    name = Checkpoints(tmp_path, 1).run_name("a")
    assert name.startswith("a-")
    assert Checkpoints(tmp_path, 1).run_name("b") == name
    assert Checkpoints(tmp_path / "other", 1).run_name("a") != name


def test_the_first_version_is_remembered(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1)
    name = store.run_name("a")
    assert store.base_version == 0
    store.set_base_version(7)
    assert Checkpoints(tmp_path, 1).base_version == 7
    assert Checkpoints(tmp_path, 1).run_name("a") == name


def test_extensions_belong_to_their_round(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1)
    assert store.extended("r.1") == []
    store.note_extended("r.1", ["e0-5", "e0-6"])
    assert Checkpoints(tmp_path, 1).extended("r.1") == ["e0-5", "e0-6"]
    assert store.extended("r.2") == []
