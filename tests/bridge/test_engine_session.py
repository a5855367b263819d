"""When the engine session pushes weights, and under which version."""

from pathlib import Path

import pytest

from tests.bridge.fake_engine_and_trainer import FakeEngineAndTrainer, connect, make_session
from tests.bridge.test_rollout import FakeRolloutEngine, group_ids, rollout_driver, sent_prompts
from trainer_bridge.handshake import HandshakeError


def test_colocated_engine_that_keeps_its_memory_is_refused(tmp_path: Path) -> None:
    server = FakeEngineAndTrainer()
    server.gpus = ["a"]
    with pytest.raises(HandshakeError, match=r"^colocate: the engine at http://engine "):
        connect(make_session(server, tmp_path, colocate=True)[0])
    connect(make_session(server, tmp_path)[0])
    assert server.pushes == [None]


def test_new_run_pushes_once_and_then_once_per_step(tmp_path: Path) -> None:
    server = FakeEngineAndTrainer()
    server.version = 6
    session, rollouts = make_session(server, tmp_path)
    connect(session)
    assert (server.pushes, session.version, session.reconnected) == ([None], 7, False)
    rollouts.engines_with_carry = {0}
    session.step = 1
    session.sync_weights()
    session.sync_weights()
    assert (server.pushes, server.version) == ([None, 8], 8)


def test_trainer_restarted_from_a_checkpoint_does_not_push_to_an_engine_that_is_ahead(tmp_path: Path) -> None:
    server = FakeEngineAndTrainer()
    session, rollouts = make_session(server, tmp_path)
    connect(session)
    server.version, server.runs, server.groups = 4, {"r"}, ["e0-0"]
    again, rollouts = make_session(server, tmp_path, step=1)
    connect(again)
    assert rollouts.engines_with_carry
    assert (server.pushes, again.version, again.reconnected) == ([None], 2, True)
    for step in (2, 3):
        again.step = step
        again.sync_weights()
    assert server.pushes == [None]
    again.step = 4
    again.sync_weights()
    assert server.pushes == [None, 5]


def test_new_engine_gets_the_weights_of_the_step_under_their_version(tmp_path: Path) -> None:
    session, _ = make_session(FakeEngineAndTrainer(), tmp_path)
    connect(session)
    server = FakeEngineAndTrainer()
    again, rollouts = make_session(server, tmp_path, step=5)
    connect(again)
    assert not rollouts.engines_with_carry
    assert (server.pushes, again.version) == ([6], 6)


def test_foreign_engine_with_a_higher_version_continues_from_its_own_version(tmp_path: Path) -> None:
    session, _ = make_session(FakeEngineAndTrainer(), tmp_path)
    connect(session)
    server = FakeEngineAndTrainer()
    server.version = 40
    again, _ = make_session(server, tmp_path, step=5)
    connect(again)
    assert (server.pushes, again.version) == ([None], 41)


def test_engine_restored_from_its_journal_is_pushed_to_under_the_same_version(tmp_path: Path) -> None:
    session, _ = make_session(FakeEngineAndTrainer(), tmp_path)
    connect(session)
    server = FakeEngineAndTrainer()
    server.version, server.runs, server.groups, server.unnamed = 3, {"r"}, ["e0-0"], True
    again, rollouts = make_session(server, tmp_path, step=2)
    connect(again)
    assert rollouts.engines_with_carry
    assert (server.pushes, again.version) == ([3], 3)


def test_released_memory_does_not_hide_that_the_version_is_unnamed(tmp_path: Path) -> None:
    """A colocated run repeats its steps at a restarted engine, up to the one whose version the engine had."""
    server = FakeEngineAndTrainer()
    session, _ = make_session(server, tmp_path)
    connect(session)
    server.version, server.runs, server.rounds, server.unnamed = 3, {"r"}, {"r.2"}, True
    again, _ = make_session(server, tmp_path, step=1)
    connect(again)
    again.step, server.closed = 2, "memory is released (kv_cache): POST /resume_memory_occupation first"
    again.sync_weights()
    assert (server.pushes, again.version, server.unnamed) == ([None, 3], 3, False)


def test_engine_with_a_reply_to_the_next_round_has_the_carry(tmp_path: Path) -> None:
    server = FakeEngineAndTrainer()
    server.rounds = {"r.3"}
    session, rollouts = make_session(server, tmp_path, step=2)
    connect(session)
    assert rollouts.engines_with_carry


@pytest.mark.parametrize("last", ["r.2", "r.1"])
def test_engine_has_the_carry_of_agents_if_it_has_had_their_last_round(tmp_path: Path, last: str) -> None:
    """Their groups may be new: one that still runs begins its trajectory anew at a restarted engine."""
    server = FakeEngineAndTrainer()
    server.rounds, server.groups = {last}, ["g"]
    session, rollouts = make_session(server, tmp_path, step=2, agent="m:f")
    connect(session)
    assert bool(rollouts.engines_with_carry) is (last == "r.2")


def test_steps_before_a_repeated_push_keep_their_versions(tmp_path: Path) -> None:
    """One of several engines was restarted: its weights were pushed to all of them, under a version of their own."""
    server, restarted = FakeEngineAndTrainer(), FakeEngineAndTrainer()
    session, _ = make_session(server, tmp_path, others=[restarted])
    connect(session)
    for step in (1, 2):
        session.step = step
        session.sync_weights()
    restarted.unnamed = True
    server.runs = restarted.runs = {"r"}
    connect(session)
    assert (server.version, restarted.version, session.version) == (4, 4, 4)
    server.rounds = restarted.rounds = {"r.2", "r.3"}
    again, _ = make_session(server, tmp_path, step=1, others=[restarted])
    connect(again)
    assert again.version == 2, "the reply to round 2 was drawn under it"
    again.step = 2
    again.sync_weights()
    assert (again.version, server.pushes[-1]) == (4, None)


def test_finished_run_that_goes_on_sends_the_prompts_that_its_end_has_dropped(tmp_path: Path) -> None:
    """The engine still lists the run, has its weights and remembers its last round. If the next round is interrupted,
    the engine has it, and its request is repeated as it was."""
    server = FakeEngineAndTrainer()
    session, _ = make_session(server, tmp_path)
    connect(session)
    server.version, server.runs, server.rounds = 3, {"r"}, {"r.2"}
    engine = FakeRolloutEngine()
    for _ in range(2):
        driver = rollout_driver(engine, tmp_path / "again", ["ok"] * 9, over_sampling_batch_size=3)
        driver.pool.draw(2)
        again, _ = make_session(server, tmp_path, step=2, rollouts=driver)
        connect(again)
        assert server.pushes == [None]
        assert group_ids(driver.round("r.3", 2)) == ["e0-0", "e0-1"]
        server.rounds.add("r.3")
        engine.waiting = []
    assert sent_prompts(engine)[0] == ["e0-0", "e0-1", "e0-2"]
    assert engine.bodies[0] == engine.bodies[1]


def test_trainer_killed_during_a_push_repeats_its_round_before_it_pushes(tmp_path: Path) -> None:
    """The engine has mixed weights and no usable version, but its kept reply needs neither."""
    server = FakeEngineAndTrainer()
    session, _ = make_session(server, tmp_path)
    connect(session)
    server.version, server.runs, server.push_open = 3, {"r"}, True
    server.rounds = {"r.3"}
    again, _ = make_session(server, tmp_path, step=2)
    connect(again)
    assert (server.pushes, again.version) == ([None], 3), "nothing has been pushed yet"
    again.step = 3
    again.sync_weights()
    assert (server.pushes, server.version) == ([None, 4], 4)


def test_interrupted_push_is_repeated_if_the_next_round_has_no_reply(tmp_path: Path) -> None:
    server = FakeEngineAndTrainer()
    session, _ = make_session(server, tmp_path)
    connect(session)
    server.version, server.runs, server.push_open = 3, {"r"}, True
    again, _ = make_session(server, tmp_path, step=2)
    connect(again)
    assert (server.pushes, again.version, server.version) == ([None, None], 4, 4)


def test_restored_engine_that_is_ahead_answers_before_its_version_is_named(tmp_path: Path) -> None:
    server = FakeEngineAndTrainer()
    session, _ = make_session(server, tmp_path)
    connect(session)
    server.version, server.runs, server.unnamed, server.rounds = 3, {"r"}, True, {"r.2"}
    again, _ = make_session(server, tmp_path, step=1)
    connect(again)
    assert (server.pushes, again.version) == ([None], 2)
    again.step = 2
    again.sync_weights()
    assert (server.pushes[-1], again.version, server.unnamed) == (3, 3, False)


def test_weights_of_a_failed_push_are_pushed_again(tmp_path: Path) -> None:
    server = FakeEngineAndTrainer()
    session, _ = make_session(server, tmp_path)
    connect(session)
    server.version, server.runs, server.failed = 3, {"r"}, "a weight call failed"
    again, _ = make_session(server, tmp_path, step=2)
    connect(again)
    assert (server.pushes, again.version, server.failed) == ([None, None], 4, "")
