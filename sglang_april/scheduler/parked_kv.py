"""The KV that ended legs of trajectories keep for the next ones, which `--april-park-gb` limits (`parked-kv`)."""

from sglang_april.scheduler.state import Sample


class ParkedKv:
    """Parked samples in the order in which their legs ended, and their tokens of KV."""

    def __init__(self) -> None:
        self._tokens: dict[Sample, int] = {}
        self.tokens = 0
        """Of all parked samples."""

    def add(self, sample: Sample) -> None:
        assert sample.kv.pages is not None
        self._tokens[sample] = sample.kv.pages.length
        self.tokens += sample.kv.pages.length

    def remove(self, sample: Sample) -> None:
        """A no-op for a sample that is not parked."""
        self.tokens -= self._tokens.pop(sample, 0)

    def first(self) -> Sample:
        """The sample that was parked first; there must be one."""
        return next(iter(self._tokens))
