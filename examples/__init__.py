"""Runnable examples: a tiny model, a small task with long-tailed answers, and the demo."""
