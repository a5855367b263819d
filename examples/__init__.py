"""Runnable examples: a tiny model, a small task with long-tailed answers, and the demo."""

from examples import interrupt

interrupt.while_importing()
