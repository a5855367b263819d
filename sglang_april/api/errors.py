"""The one way in which the HTTP process says no."""

MAX_TEXT = 500


class RequestError(Exception):
    """A request that changes nothing: an HTTP status, the field that is wrong, and why."""

    def __init__(self, status: int, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.status = status
        self.field = field[:MAX_TEXT]
        self.reason = reason[:MAX_TEXT]

    def body(self) -> dict[str, dict[str, str]]:
        """The JSON body of the error reply: `{"error": {"field", "reason"}}`."""
        return {"error": {"field": self.field, "reason": self.reason}}


def bad(field: str, reason: str) -> RequestError:
    """A 400."""
    return RequestError(400, field, reason)


def fault(error: BaseException) -> RequestError:
    """A fault of ours, as an answer."""
    return RequestError(500, "server", f"{type(error).__name__}: {error}")
