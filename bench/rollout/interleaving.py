"""Which cells are measured in turns, and how."""

import enum
import random

from bench.rollout.presets import Cell

IN_TURNS = ("synchronous", "outside", "outside-retry3s", "april-keep", "april-recompute", "april-auto", "april-factor")
"""Between two rounds of these nothing runs, and their next push leaves no prefix to be found: their rounds are measured
in turns, round by round, and a machine that becomes faster or slower meanwhile does so for all of them."""
BLOCK = 4
"""The others leave something in the engine between rounds: they take turns of so many rounds, after one that is not
measured."""


class Interleaving(enum.Enum):
    """How cells of one table take turns."""

    ROUNDS = "round by round"
    BLOCKS = "in blocks of rounds"


def kind(cell: Cell) -> Interleaving:
    """How a cell is measured among others."""
    return Interleaving.ROUNDS if cell.variant in IN_TURNS else Interleaving.BLOCKS


def in_turns(cells: list[Cell]) -> list[list[Cell]]:
    """The cells in the order of their tables, those together that are measured in turns."""
    tables: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        tables.setdefault((*_table(cell), kind(cell)), []).append(cell)
    return list(tables.values())


def shuffled(count: int, cell: Cell, turn: int) -> list[int]:
    """The order of a turn in the table of a cell, a different one each time: a variant that sleeps leaves a cooler
    machine to the one that is next."""
    return random.Random(f"{_table(cell)} {turn}").sample(range(count), count)


def _table(cell: Cell) -> tuple[str, str | None, int, float]:
    return cell.distribution, cell.together or cell.ablation, cell.repetition, cell.trainer
