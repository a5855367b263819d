"""What the HTTP process needs of an engine; `adapter/core/frontend.py` implements it on SGLang."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ServerInfo:
    """Properties of the server that requests are checked against."""

    vocab_size: int
    context_len: int
    """Maximum tokens of prompt and output together."""
    max_input_len: int
    """A prompt must have fewer tokens (the KV pool may be smaller than the context)."""
    has_tokenizer: bool
    priority: bool
    """Whether the server schedules by priority."""
    overlap: bool
    """Whether the scheduler runs its overlap loop."""
    grammar: bool = True
    dtype: str = "float32"
    """Type of the weights, by torch's name."""
    preferred: dict[str, Any] | None = None
    """The server's default sampling parameters."""
    model: dict[str, Any] = field(default_factory=dict)
    """What a trainer compares with its own: the model's shape, the engine's tensor-parallel size, its memory saver."""


class ReaderLock(Protocol):
    """The reader side of SGLang's `model_update_lock`."""

    async def acquire_reader(self) -> None:
        """Wait until no weight call holds or awaits the lock."""

    async def release_reader(self) -> None:
        """Let a waiting weight call run."""


class Frontend(Protocol):
    """Access to the scheduler, the tokenizer and the sampling parameters. Errors are ValueErrors with a reason."""

    lock: ReaderLock

    def server_info(self) -> ServerInfo:
        """Available once the server has started."""

    def listen(self) -> None:
        """Start to receive the scheduler's messages, if that has not begun."""

    async def send(self, payload: bytes) -> None:
        """Send an encoded `messages.Command` to the scheduler; its answer arrives at `AprilService.receive`."""

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, as SGLang computes them. Runs in a worker thread."""

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation with the generation prompt. Runs in a worker thread."""

    def encode_params(self, params: dict[str, Any]) -> bytes:
        """SGLang's `SamplingParams`, normalised and verified, by name as msgpack. Runs in a worker thread."""

    async def rescore(self, rid: str, ids: list[int], start: int, temperature: float) -> list[float]:
        """Logprobs of `ids[start + 1:]` by a plain prefill, which reads no KV of samples.

        Raises:
            ValueError: the request was aborted or refused.
        """

    def abort(self, rid: str) -> None:
        """Abort a `rescore` in flight; it ends within a step."""

    def decode(self, ids: list[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str | None:
        """The text of token ids; None where the server has no tokenizer. Runs in a worker thread."""
