"""Handlers of the made-up release."""

from collections.abc import Callable
from typing import Any


def multiply(step: Callable[..., int], engine: Any, tokens: int) -> int:
    """AROUND Engine.step."""
    return 10 * step(engine, tokens)
