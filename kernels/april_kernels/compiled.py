"""Loops over CPU tensors, compiled by numba, where plain torch would need many passes over memory."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

R = TypeVar("R")


def compiled(signature: str, **options: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Compile a loop for one signature: cached on disk if a folder is writable, else once per process.

    Like torch's own loops, it releases the GIL, so that other threads run (for example copies of pages), and division
    by zero raises no error.
    """
    options = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        try:
            return numba.njit(signature, **options, cache=True)(function)
        except RuntimeError:  # numba finds no folder that it may write to
            return numba.njit(signature, **options)(function)

    return decorate


def inlined(fastmath: set[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a part of a compiled loop, which needs no signature."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        return numba.njit(**options)(function)

    return decorate


@intrinsic
def prefetch(_context: Any, array: Any, index: Any) -> Any:
    """prefetch(array, index), in compiled loops: request the cache line of a flat array's element without waiting
    (llvm.prefetch: a read with high temporal locality). The index may be out of bounds."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = target.make_array(signature.args[0])(target, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        call = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], _PREFETCH)
        builder.call(call, [pointer, *(ir.Constant(ir.IntType(32), flag) for flag in (0, 3, 1))])
        return target.get_dummy_value()

    return types.void(array, index), generate


_PREFETCH = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3])
"""Address; read (0) or write; locality, 3 the most; data (1) or instructions."""
