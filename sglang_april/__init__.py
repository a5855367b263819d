"""Native partial-rollout scheduling for SGLang (design: README.md)."""

__version__ = "0.1.0"

PROTOCOL = 2
"""Version of the HTTP API. Client and server must have the same; the versions of their packages may differ."""
