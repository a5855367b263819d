"""Native partial-rollout scheduling for SGLang (design: README.md)."""

__version__ = "0.1.0"
