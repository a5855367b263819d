"""Rewards, computed in worker processes while other samples are still generated.

A reward is a function of a `RewardSample` and a `TrainingPrompt`. Each call has a timeout; a worker that exceeds it is
killed and replaced. A call that fails or times out is repeated once. If that fails too, its samples have no reward:
they are masked and excluded from the baseline, not scored 0.

The worker processes import this module, so it must not import anything heavy.
"""

import importlib
import importlib.util
import math
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer_bridge import child_processes

ATTEMPTS = 2
START_TIMEOUT_S = 300.0
"""Seconds for a worker to import the reward function."""


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt, with the data that its reward needs."""

    id: str
    """`e<epoch>-<row>`: in the next epoch the same row is another prompt, with other sampling noise."""
    content: Any
    """Text, messages or token ids."""
    label: Any
    metadata: Any

    def body(self, n: int) -> dict[str, Any]:
        """The prompt as a rollout request has it, with `n` samples."""
        if isinstance(self.content, str):
            field = "text"
        elif self.content and isinstance(self.content[0], Mapping):
            field = "messages"
        else:
            field = "input_ids"
        return {"id": self.id, field: self.content, "n": n}


@dataclass(frozen=True, slots=True)
class RewardSample:
    """A sample as its reward sees it."""

    text: str | None
    output_ids: list[int]
    finish_reason: dict[str, Any]
    index: int


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a sample, or why it has none."""

    reward: float | None
    problem: str = ""


class RewardError(Exception):
    """A failed call of a reward function."""


def math_answer(sample: RewardSample, prompt: TrainingPrompt) -> float:
    """1.0 if math-verify finds the last answer in the text equal to the label, else 0.0."""
    from math_verify import parse, verify

    gold = str(prompt.label)
    gold = gold if "\\boxed" in gold or "$" in gold else f"${gold}$"
    return float(verify(parse(gold), parse(sample.text or "")))


def load_function(path: str) -> Callable[..., Any]:
    """The function at `module:function` or `file.py:function`.

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: the module has no such function.
    """
    module, _, name = path.rpartition(":")
    if module.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module} cannot be imported")
        loaded: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
    else:
        loaded = importlib.import_module(module)
    function: Callable[..., Any] = getattr(loaded, name)
    return function


def _serve(connection: Connection, path: str) -> None:
    """Main function of a worker: calls the reward for each message and answers (True, value) or (False, error)."""
    try:
        function = load_function(path)
    except Exception as error:  # noqa: BLE001 - sent to the trainer, which ends the run
        connection.send((False, f"{path}: {error!r}"))
        return
    connection.send((True, None))
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(*arguments)))
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            connection.send((False, repr(error)))


class RewardWorker:
    """A worker process, which is restarted after a timeout or a crash."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process and wait for the import of the function. Raises: RewardError: the import fails."""
        self._process, self._connection = child_processes.start_worker(_serve, self._path)
        self._receive(START_TIMEOUT_S)

    def call(self, arguments: tuple[Any, ...], timeout: float) -> Any:
        """The value of the function.

        Raises: RewardError: it raised, it took longer than `timeout` seconds, or the process died.
        """
        if self._connection is None:
            self.start()
        assert self._connection is not None
        try:
            self._connection.send(arguments)
        except OSError as error:
            self.stop()
            raise RewardError("the reward process died") from error
        return self._receive(timeout)

    def _receive(self, timeout: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(timeout):
            self.stop()
            raise RewardError(f"no reward after {timeout:g} s")
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self.stop()
            raise RewardError("the reward process died") from error
        except Exception as error:  # such as a value whose class only the worker can import
            self.stop()
            raise RewardError(f"the value of the reward cannot be read: {error!r}") from error
        if not succeeded:
            raise RewardError(value)
        return value

    def stop(self) -> None:
        """Kill the process; the next call starts another one."""
        if self._process is not None:
            child_processes.kill([self._process])
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


class Rewards:
    """A pool of reward workers."""

    def __init__(self, path: str, workers: int, timeout: float, *, per_group: bool = False) -> None:
        self._timeout, self._per_group = timeout, per_group
        self._workers = [RewardWorker(path) for _ in range(workers)]
        self._free: queue.SimpleQueue[RewardWorker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reward")
        list(self._threads.map(RewardWorker.start, self._workers))
        for worker in self._workers:
            self._free.put(worker)

    def submit(self, samples: Sequence[RewardSample], prompt: TrainingPrompt) -> "Future[list[Score]]":
        """One score per sample, in order. Returns at once; the future raises only if the pool is closed."""
        if self._per_group:
            return self._threads.submit(self._score_group, list(samples), prompt)
        return _gather([self._threads.submit(self._score_sample, sample, prompt) for sample in samples])

    def close(self) -> None:
        """Stop the processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def _score_sample(self, sample: RewardSample, prompt: TrainingPrompt) -> Score:
        return self._call((sample, prompt), lambda value: [_finite(value)])[0]

    def _score_group(self, samples: list[RewardSample], prompt: TrainingPrompt) -> list[Score]:
        def parse(value: Any) -> list[float]:
            rewards = [_finite(reward) for reward in value]
            if len(rewards) != len(samples):
                raise RewardError(f"{len(rewards)} rewards for {len(samples)} samples")
            return rewards

        scores = self._call((samples, prompt), parse)
        return scores if len(scores) == len(samples) else scores * len(samples)

    def _call(self, arguments: tuple[Any, ...], parse: Callable[[Any], list[float]]) -> list[Score]:
        """The rewards of a call; after the last failed attempt one Score without a reward."""
        worker, problem = self._free.get(), ""
        try:
            for _ in range(ATTEMPTS):
                try:
                    return [Score(reward) for reward in parse(worker.call(arguments, self._timeout))]
                except Exception as error:  # noqa: BLE001 - converting a user's value may raise anything
                    problem = str(error) if isinstance(error, RewardError) else repr(error)
            return [Score(None, problem)]
        finally:
            self._free.put(worker)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"the reward is {number}")
    return number


def _gather(futures: "list[Future[Score]]") -> "Future[list[Score]]":
    """One future for all results. It is completed by the last one's callback, so that no thread waits for it."""
    gathered: Future[list[Score]] = Future()
    remaining = queue.SimpleQueue[None]()
    for _ in futures[1:]:
        remaining.put(None)

    def done(_: "Future[Score]") -> None:
        try:
            remaining.get_nowait()
        except queue.Empty:
            try:
                gathered.set_result([future.result() for future in futures])
            except CancelledError as error:  # the pool was closed; an exception in a callback would be lost
                gathered.set_exception(error)

    if not futures:
        gathered.set_result([])
    for future in futures:
        future.add_done_callback(done)
    return gathered
