"""Loops over CPU tensors, compiled by numba, where plain torch would need many passes over memory."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(signature: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: compiled for one signature, kept on disk where there is a place for it, else once per process.

    As torch's own loops do, it lets other threads run (copies of pages, for one), and divides by zero without an error.
    """
    options = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        try:
            return numba.njit(signature, **options, cache=True)(function)
        except RuntimeError:  # numba finds no folder that it may write to
            return numba.njit(signature, **options)(function)

    return decorate
