"""Parts of the loop without engine and trainer: evaluations over a trainer's death, acknowledgements, the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglang_april.client import AprilError
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.bridge.test_rollout import STATS, FakeRewards, finished
from trainer_bridge.config import Config
from trainer_bridge.loop import TrainingLoop
from trainer_bridge.megatron.workers import TrainerFailed
from trainer_bridge.progress import read_rows
from trainer_bridge.validate import RunError

EVALUATIONS = {"eval_interval": 5, "save_interval": 20}


class FakeServer:
    """Replies by id: of those that need not be kept, the last two of a run (S8)."""

    def __init__(self) -> None:
        self.kept: dict[str, bool] = {}
        """By id, whether it waits for its acknowledgement."""
        self.gone: set[str] = set()
        self.generated: list[str] = []
        self.acks_to_death: int | None = None
        self.failures = 0
        """So many of the next calls at the end of a run find nobody."""
        self.ends: list[str] = []

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        name = body["round_id"]
        self.find(name, new=True)
        if name not in self.kept:
            self.generated.append(name)
            self.kept[name] = body.get("keep_until_ack", False)
            self.trim()
        for prompt in body["prompts"]:
            yield finished(prompt)
        yield RolloutSummary(name, body["run"], 1, "exhausted", [], {"groups": 0}, STATS)

    def ack(self, name: str) -> None:
        if self.acks_to_death is not None:
            if not self.acks_to_death:
                raise KeyboardInterrupt
            self.acks_to_death -= 1
        self.find(name)
        self.kept[name] = False
        self.trim()

    def find(self, name: str, *, new: bool = False) -> None:
        if name in self.gone:
            raise AprilError(410, "round_id", f"the reply of round {name} is no longer kept")
        if name not in self.kept and not new:
            raise AprilError(404, "round_id", f"there is no round {name}")

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
            raise httpx.ConnectError("nobody there")
        self.ends.append(call)


class FakeLink:
    """Calls again what found nobody."""

    def __init__(self, *_: Any) -> None:
        self.step = 0

    def align(self) -> None:
        pass

    def call(self, do: Callable[[], Any], warn: Any, *, at_once: bool = True) -> Any:
        while True:
            try:
                return do()
            except httpx.TransportError:
                pass


class FakeTrainer:
    def save(self, folder: Path) -> None:
        pass

    def load(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def loop(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainingLoop]]:
    """A trainer of the run in `tmp_path`; the next one is its successor."""
    rewards = SimpleNamespace(submit=FakeRewards().submit, close=lambda: None)
    monkeypatch.setattr("trainer_bridge.loop._rewards", lambda _: rewards)
    monkeypatch.setattr(
        "trainer_bridge.loop.RolloutEngines", lambda *_: SimpleNamespace(client=server, close=lambda: None)
    )
    monkeypatch.setattr("trainer_bridge.loop.EngineSession", FakeLink)
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "q", "label": "ok"}\n' * 3)
    made: list[TrainingLoop] = []

    def make(**fields: Any) -> TrainingLoop:
        if "eval_interval" in fields:
            fields["eval_prompt_data"] = str(data)
        base: dict[str, Any] = {"hf_checkpoint": "m", "prompt_data": str(data), "save": str(tmp_path / "run")}
        base |= {"n_samples_per_eval_prompt": 2}
        made.append(TrainingLoop(Config(**base, **fields), FakeTrainer()))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def go(loop: TrainingLoop, server: FakeServer, last: int) -> None:
    """From the last checkpoint (or the start) through so many steps, as `TrainingLoop.run`, without training."""
    loop._restore()
    loop._evaluate()
    for step in range(loop.state.step + 1, last + 1):
        loop.state.step = step
        name = f"{loop.run_name}.{step}"
        list(server.stream(round_id=name, run=loop.run_name, prompts=[], keep_until_ack=True))
        loop._save([SimpleNamespace(summary=SimpleNamespace(round_id=name))])  # type: ignore[list-item]
        loop._evaluate()


def evaluated(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder / "run" / "evaluations.jsonl")]


def test_a_trainer_that_was_killed_gets_all_evaluations_since_its_checkpoint_again(
    loop: Callable[..., TrainingLoop], server: FakeServer, tmp_path: Path
) -> None:
    go(loop(**EVALUATIONS), server, 19)
    assert evaluated(tmp_path) == [0, 5, 10, 15]
    go(loop(**EVALUATIONS), server, 25)
    assert evaluated(tmp_path) == [0, 5, 10, 15, 20, 25]
    assert len(server.generated) == len(set(server.generated)) == 25 + 6, "nothing is generated twice"
    name = server.generated[0].removesuffix(".eval-0")
    assert server.waiting == [*(f"{name}.{step}" for step in range(21, 26)), f"{name}.eval-25"]


@pytest.mark.parametrize("acks", range(1, 27))
def test_a_death_between_two_acknowledgements_leaves_none_out(
    loop: Callable[..., TrainingLoop], server: FakeServer, acks: int
) -> None:
    """Evaluation 0 by itself; with the checkpoint 20 rounds and 3 evaluations; evaluation 20; all in this order."""
    server.acks_to_death = acks
    if acks < 25:
        with pytest.raises(KeyboardInterrupt):
            go(loop(**EVALUATIONS), server, 20)
    else:
        go(loop(**EVALUATIONS), server, 20)
    server.acks_to_death = None
    go(loop(**EVALUATIONS), server, 20)
    assert server.waiting == []


def test_without_evaluations_rounds_alone_are_acknowledged(
    loop: Callable[..., TrainingLoop], server: FakeServer
) -> None:
    go(loop(save_interval=2), server, 5)
    assert [name.rpartition(".")[2] for name in server.waiting] == ["5"]
    assert len(server.generated) == 5


@pytest.mark.parametrize(("on_end", "calls"), [("drop", ["drop None"]), ("drain", ["partials", "drop ['e0-7']"])])
def test_a_server_that_is_lost_at_the_end_is_asked_again(
    loop: Callable[..., TrainingLoop], server: FakeServer, on_end: str, calls: list[str]
) -> None:
    server.failures = 1
    loop(on_end=on_end)._end()
    assert server.ends == calls


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(28, "No space left on device"), RunError, r"step-000020 cannot be written: .*No space left"),
        (RuntimeError("unexpected pos 704\nframe #0"), RunError, r"step-000020 cannot be written: unexpected pos 704$"),
        (TrainerFailed("trainer rank 1 has died"), TrainerFailed, "rank 1"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_folder(
    loop: Callable[..., TrainingLoop], server: FakeServer, error: Exception, kind: type[Exception], said: str
) -> None:
    made = loop(save_interval=20)

    def full(_: Path) -> None:
        raise error

    made.trainer.save = full  # type: ignore[method-assign]
    with pytest.raises(kind, match=said):
        go(made, server, 20)


def test_a_step_whose_groups_are_all_unfit_says_so(loop: Callable[..., TrainingLoop]) -> None:
    made = loop()
    brought = SimpleNamespace(groups=[], problems=["no opinion"])
    made.rollouts.round = lambda *_, **__: brought  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(RunError, match=r"32 groups short after 10 rounds.*no opinion"):
        made._rounds("r.1", 32)
