"""Benchmarks: `python -m bench.NAME --help`."""

from examples import interrupt

interrupt.while_importing()
