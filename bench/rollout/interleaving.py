"""Which cells alternate while they are measured, and how."""

import enum
import random

from bench.rollout.presets import Cell

INTERLEAVED = (
    "synchronous",
    "outside",
    "outside-retry3s",
    "april-keep",
    "april-recompute",
    "april-auto",
    "april-factor",
)
"""Variants that alternate round by round: nothing of them runs between two rounds, and a push leaves no prefix to
reuse. A change in the speed of the machine then affects all of them alike."""
BLOCK = 4
"""Other variants leave requests or KV in the engine between rounds. They alternate in blocks of this many rounds, each
after one that is not measured."""


class Interleaving(enum.Enum):
    """How cells of one table alternate."""

    ROUNDS = "round by round"
    BLOCKS = "in blocks of rounds"


def kind(cell: Cell) -> Interleaving:
    """How a cell alternates with others."""
    return Interleaving.ROUNDS if cell.variant in INTERLEAVED else Interleaving.BLOCKS


def interleaved_groups(cells: list[Cell]) -> list[list[Cell]]:
    """The cells in the order of their tables, grouped by those that alternate with one another."""
    tables: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        tables.setdefault((*_table(cell), kind(cell)), []).append(cell)
    return list(tables.values())


def shuffled(count: int, cell: Cell, turn: int) -> list[int]:
    """The order of the variants in one turn, different for each turn: a variant that sleeps leaves a cooler machine to
    the next one."""
    return random.Random(f"{_table(cell)} {turn}").sample(range(count), count)


def _table(cell: Cell) -> tuple[str, str | None, int, float]:
    return cell.distribution, cell.together or cell.ablation, cell.repetition, cell.trainer
