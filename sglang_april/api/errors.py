"""The error form of every route: an HTTP status, a field and a reason."""

MAX_TEXT = 500
JOURNAL = "journal"
"""The field of a 500 for what the scheduler has done but the journal can never hold, and of a 503 for a round whose
answer waits until the journal can be written again."""
SHUTDOWN = "shutdown"
"""The field of a 503 while the server ends. Clients take it for a lost server: a restart may continue the round."""


class RequestError(Exception):
    """A refused request, which has changed nothing (`refusal-changes-nothing`)."""

    def __init__(self, status: int, field: str, reason: str) -> None:
        """`status`: HTTP status of the reply; `field`: the request field at fault; `reason`: the rest of a sentence."""
        super().__init__(f"{field}: {reason}")
        self.status = status
        self.field = field[:MAX_TEXT]
        self.reason = reason[:MAX_TEXT]

    @property
    def unjournalled(self) -> bool:
        """Whether the scheduler has carried the request out, and the journal cannot store it."""
        return (self.status, self.field) == (500, JOURNAL)

    def body(self) -> dict[str, dict[str, str]]:
        """The body of the error reply."""
        return {"error": {"field": self.field, "reason": self.reason}}


def bad(field: str, reason: str) -> RequestError:
    """A 400 for an invalid field."""
    return RequestError(400, field, reason)


def fault(error: BaseException) -> RequestError:
    """A 500 for an unexpected exception of the plugin."""
    return RequestError(500, "server", f"{type(error).__name__}: {error}")
