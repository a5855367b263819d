"""Parts of the loop without engine and trainer: evaluations after a restart, acknowledgements, end of the run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_april.client import AprilError, RoundLostError, ServerLostError
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.bridge.test_rollout import STATS, FakeRewards, finished_group
from tests.bridge.test_samples import group
from trainer_bridge.batch import MicroBatch
from trainer_bridge.config import Config
from trainer_bridge.engine_session import ATTEMPTS, ENGINE_LOST
from trainer_bridge.loop import TrainingLoop
from trainer_bridge.loss_stats import LossStats
from trainer_bridge.megatron.workers import TrainerFailed
from trainer_bridge.progress import read_rows
from trainer_bridge.samples import training_samples
from trainer_bridge.server_process import EngineGoneError
from trainer_bridge.validate import RunError

EVALUATIONS = {"eval_interval": 5, "save_interval": 20}


class FakeReplies:
    """Keeps replies by id: unacknowledged ones, and the last two of a run (`kept-replies`)."""

    def __init__(self) -> None:
        self.kept: dict[str, bool] = {}
        """By id, whether the reply waits for its acknowledgement."""
        self.gone: set[str] = set()
        self.generated: list[str] = []
        self.acks_until_crash: int | None = None
        self.failures = 0
        """How many of the next calls at the end of the run fail to connect."""
        self.ends: list[str] = []

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        name = body["round_id"]
        self.find(name, new=True)
        if name not in self.kept:
            self.generated.append(name)
            self.kept[name] = body.get("keep_until_ack", False)
            self.trim()
        for prompt in body["prompts"]:
            yield finished_group(prompt)
        yield RolloutSummary(name, body["run"], 1, "exhausted", [], {"groups": 0}, STATS)

    def ack(self, name: str) -> None:
        if self.acks_until_crash is not None:
            if not self.acks_until_crash:
                raise KeyboardInterrupt
            self.acks_until_crash -= 1
        self.find(name)
        self.kept[name] = False
        self.trim()

    def find(self, name: str, *, new: bool = False) -> None:
        if name in self.gone:
            raise AprilError(410, "round_id", f"the reply of round {name} is no longer kept")
        if name not in self.kept and not new:
            raise RoundLostError(404, "round_id", f"there is no round {name}")

    def trim(self) -> None:
        for of_evaluation in (True, False):
            names = [name for name in self.kept if ("eval" in name) is of_evaluation]
            for old in names[:-2]:
                if not self.kept[old]:
                    del self.kept[old]
                    self.gone.add(old)

    @property
    def waiting(self) -> list[str]:
        """Replies that wait for their acknowledgement."""
        return [name for name, waits in self.kept.items() if waits]

    def partials(self, run: str) -> dict[str, Any]:
        self.end("partials")
        return {"partials": [], "unstarted": [{"id": "e0-7"}]}

    def drop(self, run: str, ids: list[str] | None = None) -> None:
        self.end(f"drop {ids}")

    def end(self, call: str) -> None:
        if self.failures:
            self.failures -= 1
            raise ServerLostError(0, "server", "connection refused")
        self.ends.append(call)


class FakeSession:
    """Repeats calls during which the engine is lost."""

    def __init__(self, *_: Any) -> None:
        self.step = 0

    def sync_weights(self) -> None:
        pass

    def call(self, function: Callable[[], Any], warn: Any, *, reconnect_first: bool = False) -> Any:
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(*ENGINE_LOST):
                return function()
        try:
            return function()
        except ENGINE_LOST as error:
            raise EngineGoneError from error


class FakeTrainer:
    def save(self, folder: Path) -> None:
        pass

    def load(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def server() -> FakeReplies:
    return FakeReplies()


@pytest.fixture
def loop(server: FakeReplies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainingLoop]]:
    """Creates loops for the same run, each resuming from the checkpoints of the previous one."""
    rewards = SimpleNamespace(submit=FakeRewards().submit, close=lambda: None)
    monkeypatch.setattr("trainer_bridge.loop._start_rewards", lambda _: rewards)
    monkeypatch.setattr(
        "trainer_bridge.loop.RolloutEngines", lambda *_: SimpleNamespace(client=server, close=lambda: None)
    )
    monkeypatch.setattr("trainer_bridge.loop.EngineSession", FakeSession)
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "q", "label": "ok"}\n' * 3)
    loops: list[TrainingLoop] = []

    def make(**fields: Any) -> TrainingLoop:
        if "eval_interval" in fields:
            fields["eval_prompt_data"] = str(data)
        base: dict[str, Any] = {"hf_checkpoint": "m", "prompt_data": str(data), "save": str(tmp_path / "run")}
        base |= {"n_samples_per_eval_prompt": 2}
        loops.append(TrainingLoop(Config(**base | fields), FakeTrainer()))  # type: ignore[arg-type]
        return loops[-1]

    yield make
    for each in loops:
        each.close()


def run_steps(loop: TrainingLoop, server: FakeReplies, last: int) -> None:
    """Run from the last checkpoint (or the start) to step `last`, like `TrainingLoop.run` but without training."""
    loop._restore()
    loop._evaluate()
    for step in range(loop.state.step + 1, last + 1):
        loop.state.step = step
        name = f"{loop.run_name}.{step}"
        list(server.stream(round_id=name, run=loop.run_name, prompts=[], keep_until_ack=True))
        loop._save([SimpleNamespace(summary=SimpleNamespace(round_id=name))])  # type: ignore[list-item]
        loop._evaluate()


def evaluated_steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder / "run" / "evaluations.jsonl")]


def test_actors_with_another_working_folder_use_the_same_files(
    loop: Callable[..., TrainingLoop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = loop(save="out/run", hf_checkpoint="models/m")
    assert made.config.trainer.hf_checkpoint == tmp_path / "models/m"
    assert (Path(made.config.save), made.store.path(1).parents[1]) == (tmp_path / "out/run",) * 2


def test_restarted_trainer_repeats_all_evaluations_since_its_checkpoint(
    loop: Callable[..., TrainingLoop], server: FakeReplies, tmp_path: Path
) -> None:
    run_steps(loop(**EVALUATIONS), server, 19)
    assert evaluated_steps(tmp_path) == [0, 5, 10, 15]
    run_steps(loop(**EVALUATIONS), server, 25)
    assert evaluated_steps(tmp_path) == [0, 5, 10, 15, 20, 25]
    assert len(server.generated) == len(set(server.generated)) == 25 + 6, "nothing is generated twice"
    run_name = server.generated[0].removesuffix(".eval-0")
    assert server.waiting == [*(f"{run_name}.{step}" for step in range(21, 26)), f"{run_name}.eval-25"]


@pytest.mark.parametrize("acks", range(1, 27))
def test_crash_between_two_acknowledgements_loses_none(
    loop: Callable[..., TrainingLoop], server: FakeReplies, acks: int
) -> None:
    """The order is: evaluation 0; with the checkpoint 20 rounds and 3 evaluations; evaluation 20."""
    server.acks_until_crash = acks
    if acks < 25:
        with pytest.raises(KeyboardInterrupt):
            run_steps(loop(**EVALUATIONS), server, 20)
    else:
        run_steps(loop(**EVALUATIONS), server, 20)
    server.acks_until_crash = None
    run_steps(loop(**EVALUATIONS), server, 20)
    assert server.waiting == []


def test_a_run_resumes_on_an_engine_without_its_rounds(loop: Callable[..., TrainingLoop], server: FakeReplies) -> None:
    """The server was restarted without a journal: its 404 is no loss in the middle of a round."""
    run_steps(loop(**EVALUATIONS | {"save_interval": 5}), server, 5)
    server.kept.clear()
    again = loop(**EVALUATIONS | {"save_interval": 5})
    again._restore()
    assert again._unacknowledged == []


def test_rounds_are_acknowledged_with_their_checkpoint(loop: Callable[..., TrainingLoop], server: FakeReplies) -> None:
    run_steps(loop(save_interval=2), server, 5)
    assert [name.rpartition(".")[2] for name in server.waiting] == ["5"]
    assert len(server.generated) == 5


@pytest.mark.parametrize(("on_end", "calls"), [("drop", ["drop None"]), ("drain", ["partials", "drop ['e0-7']"])])
def test_calls_at_the_end_of_the_run_are_repeated_if_the_server_is_lost(
    loop: Callable[..., TrainingLoop], server: FakeReplies, on_end: str, calls: list[str]
) -> None:
    server.failures = 1
    loop(on_end=on_end)._end()
    assert server.ends == calls


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(28, "No space left on device"), RunError, r"step-000020 cannot be written: .*No space left"),
        (RuntimeError("unexpected pos 704\nframe #0"), RunError, r"step-000020 cannot be written: unexpected pos 704$"),
        (TrainerFailed("trainer rank 1 has died"), TrainerFailed, "rank 1"),
    ],
)
def test_checkpoint_that_cannot_be_written_ends_the_run_and_is_named(
    loop: Callable[..., TrainingLoop], server: FakeReplies, error: Exception, kind: type[Exception], message: str
) -> None:
    training_loop = loop(save_interval=20)

    def raise_error(_: Path) -> None:
        raise error

    training_loop.trainer.save = raise_error  # type: ignore[method-assign]
    with pytest.raises(kind, match=message):
        run_steps(training_loop, server, 20)


def test_step_without_usable_groups_ends_the_run_with_the_reason(loop: Callable[..., TrainingLoop]) -> None:
    training_loop = loop()
    rollout = SimpleNamespace(groups=[], problems=["no opinion"])
    training_loop.rollouts.round = lambda *_, **__: rollout  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(RunError, match=r"32 groups short after 10 rounds.*no opinion"):
        training_loop._rounds("r.1", 32)


def test_a_repeated_step_repeats_all_its_rounds(loop: Callable[..., TrainingLoop]) -> None:
    """The trainer was killed in the second one, whose prompts the engine has. Its rewards fail no more."""
    asked: list[tuple[str, int]] = []

    def rounds(training_loop: TrainingLoop, delivered: list[int]) -> None:
        def play(name: str, quota: int, **_: Any) -> Any:
            asked.append((name, quota))
            return SimpleNamespace(groups=[None] * delivered.pop(0), generate_s=0.0, reward_wait_s=0.0)

        training_loop.rollouts.round = play  # type: ignore[method-assign]
        training_loop._rounds("r.1", 32)

    rounds(loop(), [30, 2])
    rounds(loop(), [32, 2])
    assert asked == [("r.1", 32), ("r.1-1", 2)] * 2
    asked.clear()
    rounds(loop(), [28, 2, 2])
    assert asked == [("r.1", 32), ("r.1-1", 2), ("r.1-2", 2)]


@pytest.mark.parametrize(("strict", "sizes"), [(True, [8]), (False, [4, 4])])
def test_strict_on_policy_takes_one_step_for_a_round_beyond_its_quota(
    loop: Callable[..., TrainingLoop], strict: bool, sizes: list[int]
) -> None:
    fields = {"rollout_batch_size": 1, "n_samples_per_prompt": 4, "global_batch_size": 4}
    training_loop, steps = loop(strict_on_policy=strict, **fields), list[int]()

    def step(batches: list[MicroBatch], _: Any) -> Any:
        steps.append(sum(batch.tokens.count for batch in batches))
        return SimpleNamespace(stats=LossStats())

    training_loop.trainer.step = step  # type: ignore[method-assign,assignment]
    groups = [group(name, [3] * 4, [0.0, 1.0, 0.0, 1.0]) for name in "ab"]
    training_loop._train(training_samples(groups, training_loop.config), 3)
    assert steps == sizes
