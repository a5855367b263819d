"""Drives a ledger without an engine: tests move the samples, and tokens are only counted."""

from typing import Any

from sglang_april.api.messages import Prompt, RoundSpec
from sglang_april.kv.kv_pages import Pages
from sglang_april.scheduler.ledger import Ledger
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Group, Sample


def prompt(name: str, n: int = 1, seed: int = 0, tokens: int = 3) -> Prompt:
    return Prompt(name, b"\0" * 4 * tokens, n, 0, seed)


class LedgerDriver:
    """One run of a ledger; the methods take the place of the engine."""

    def __init__(self, name: str = "run", ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.run = self.ledger.run(name)
        self.step = 0

    def accept(self, *prompts: Prompt) -> list[Group]:
        self.ledger.check(self.run.name, list(prompts))
        return self.ledger.accept(self.run.name, list(prompts), [b""])

    def groups(self, *sizes: int) -> list[Group]:
        """Groups g0, g1, … of so many samples."""
        first = len(self.run.groups)
        return self.accept(*(prompt(f"g{first + i}", n) for i, n in enumerate(sizes)))

    def start(self, *samples: Sample, version: int = 0) -> None:
        for sample in samples:
            self.ledger.admit(sample)
            sample.open_span(version, "fresh")

    def grow(self, *samples: Sample, tokens: int = 1) -> None:
        for sample in samples:
            sample.length += tokens

    def suspend(self, *samples: Sample, pages: int = 0) -> None:
        for sample in samples:
            self.ledger.suspend(sample)
            sample.kv.pages = Pages(pages, 0, list(range(pages)), None, None) if pages else None

    def begin(self, *samples: Sample, version: int = 0, tokens: int = 1) -> None:
        """Turn samples into partials."""
        self.start(*samples, version=version)
        self.grow(*samples, tokens=tokens)
        self.suspend(*samples)

    def finish(self, *samples: Sample, version: int = 0) -> None:
        """Finish samples, all in one step."""
        self.step += 1
        for sample in samples:
            if sample.queue_position < 0:
                self.start(sample, version=version)
                self.grow(sample)
            elif sample in self.run.suspended:
                self.ledger.admit(sample)
            self.ledger.finish(sample, self.step)

    def round(self, version: int = 0, **spec: Any) -> Round:
        fields = {"quota": 1, "quota_unit": "group", "kv": "keep", "max_staleness": 5, **spec}
        rnd = Round(RoundSpec(round_id="r", run=self.run.name, **fields), self.run, 1)
        rnd.mark_mandatory(version)
        return rnd


def names(samples: list[Sample]) -> list[str]:
    return [f"{s.group.id}.{s.index}" for s in samples]
