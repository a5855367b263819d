"""Step 7 (train), first part: rewards, computed in processes of their own while others still generate.

A reward is a function of a `RewardSample` and a `TrainingPrompt`. Each call has a time-out; a worker that exceeds it is
killed and replaced. A call that fails or times out is tried once more, and then its samples have no reward: they are
masked and left out of the baseline, never scored 0.
"""

import importlib
import importlib.util
import math
import multiprocessing
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer_bridge.prompt import TrainingPrompt

TRIES = 2
START_S = 300.0
"""A worker that has not imported its function by then is broken, not slow."""


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What a reward is told of a sample."""

    text: str | None
    output_ids: list[int]
    finish_reason: dict[str, Any]
    index: int


@dataclass(frozen=True, slots=True)
class Score:
    """A sample's reward, or why it has none."""

    reward: float | None
    problem: str = ""


class RewardError(Exception):
    """What a worker says of a call that went wrong."""


def math_answer(sample: RewardSample, prompt: TrainingPrompt) -> float:
    """1.0 where the last answer in the text equals the label, judged by math-verify; else 0.0."""
    from math_verify import parse, verify

    gold = str(prompt.label)
    gold = gold if "\\boxed" in gold or "$" in gold else f"${gold}$"
    return float(verify(parse(gold), parse(sample.text or "")))


def load_function(place: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names."""
    module, _, name = place.rpartition(":")
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


def _serve(connection: Connection, place: str) -> None:
    """A worker: calls the function for each message, answers (True, value) or (False, what went wrong)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        function = load_function(place)
    except Exception as error:  # noqa: BLE001 - told to the trainer, which ends the run
        connection.send((False, f"{place}: {error!r}"))
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
    """One process; started again after a time-out or its death."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start and wait until the function is imported; raises RewardError if it cannot be."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._place), daemon=True)
        self._process.start()
        theirs.close()
        self._connection = ours
        self._answer(START_S)

    def call(self, arguments: tuple[Any, ...], timeout: float) -> Any:
        """The function's value; RewardError if it raised, took longer than `timeout` seconds, or the process died."""
        if self._connection is None:
            self.start()
        assert self._connection is not None
        try:
            self._connection.send(arguments)
        except OSError as error:
            self.stop()
            raise RewardError("the reward's process died") from error
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(timeout):
            self.stop()
            raise RewardError(f"no reward after {timeout:g} s")
        try:
            good, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self.stop()
            raise RewardError("the reward's process died") from error
        except Exception as error:  # a value of a class that only the worker can import, say
            self.stop()
            raise RewardError(f"the reward's answer cannot be read: {error!r}") from error
        if not good:
            raise RewardError(value)
        return value

    def stop(self) -> None:
        """Kill the process; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


class Rewards:
    """The pool. `submit` returns at once; a future holds one Score per sample, in order, and never raises."""

    def __init__(self, place: str, workers: int, timeout: float, *, of_groups: bool = False) -> None:
        self._timeout, self._of_groups = timeout, of_groups
        self._workers = [RewardWorker(place) for _ in range(workers)]
        self._free: queue.SimpleQueue[RewardWorker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reward")
        list(self._threads.map(RewardWorker.start, self._workers))
        for worker in self._workers:
            self._free.put(worker)
        self.seconds = 0.0
        """Spent in calls so far, over all workers."""

    def submit(self, samples: Sequence[RewardSample], prompt: TrainingPrompt) -> "Future[list[Score]]":
        """The scores of a group's samples."""
        if self._of_groups:
            return self._threads.submit(self._group, list(samples), prompt)
        parts = [self._threads.submit(self._one, sample, prompt) for sample in samples]
        return _gather(parts)

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def _one(self, sample: RewardSample, prompt: TrainingPrompt) -> Score:
        return self._tried((sample, prompt), lambda value: [_number(value)])[0]

    def _group(self, samples: list[RewardSample], prompt: TrainingPrompt) -> list[Score]:
        def read(value: Any) -> list[float]:
            numbers = [_number(one) for one in value]
            if len(numbers) != len(samples):
                raise RewardError(f"{len(numbers)} rewards for {len(samples)} samples")
            return numbers

        scores = self._tried((samples, prompt), read)
        return scores if len(scores) == len(samples) else scores * len(samples)

    def _tried(self, arguments: tuple[Any, ...], read: Callable[[Any], list[float]]) -> list[Score]:
        """The call's rewards; after the last failure one Score without any."""
        worker, started, problem = self._free.get(), time.monotonic(), ""
        try:
            for _ in range(TRIES):
                try:
                    return [Score(reward) for reward in read(worker.call(arguments, self._timeout))]
                except Exception as error:  # noqa: BLE001 - a user's value may raise anything; who waits must hear of it
                    problem = str(error) if isinstance(error, RewardError) else repr(error)
            return [Score(None, problem)]
        finally:
            self.seconds += time.monotonic() - started
            self._free.put(worker)


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"the reward is {number}")
    return number


def _gather(parts: "list[Future[Score]]") -> "Future[list[Score]]":
    """One future for all, done when the last is; no thread waits for it."""
    whole: Future[list[Score]] = Future()
    left = queue.SimpleQueue[None]()
    for _ in parts[1:]:
        left.put(None)

    def done(_: "Future[Score]") -> None:
        try:
            left.get_nowait()
        except queue.Empty:
            try:
                whole.set_result([part.result() for part in parts])
            except CancelledError as error:  # the pool was closed; a callback's exception would be heard by nobody
                whole.set_exception(error)

    if not parts:
        whole.set_result([])
    for part in parts:
        part.add_done_callback(done)
    return whole
