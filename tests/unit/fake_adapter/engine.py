"""Acts as the source of an SGLang release."""


class Engine:
    def step(self, tokens: int) -> int:
        return tokens + 1

    def flush(self) -> None:
        """Called by an adapter without being hooked."""
