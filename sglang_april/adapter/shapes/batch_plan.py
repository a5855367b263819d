"""The scheduler loop of SGLang 0.5.16 and later, which passes its batches to the choice of the next one, a plan."""

from collections.abc import Callable
from typing import Any


def enter_step(s: Any, running_batch: Any, last_batch: Any) -> None:
    s.running_batch, s.last_batch = running_batch, last_batch


def enter_prefill(s: Any, running_batch: Any) -> None:
    s.running_batch = running_batch


def next_batch(original: Callable[..., Any], s: Any) -> Any:
    return original(s, running_batch=s.running_batch, last_batch=s.last_batch)


def prefill(original: Callable[..., Any], s: Any) -> Any:
    return original(s, s.running_batch)


def no_prefill(s: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=s.running_batch)


def batch_of(result: Any) -> Any:
    return result.batch_to_run


def forget_last_batch(s: Any) -> None:
    """Nothing else refers to it."""
