"""What the parts of the scheduler side share: one per scheduler process, replicated on every TP rank."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, TextIO

from sglang_april.api import messages
from sglang_april.kv.kv_pages import CopyTier
from sglang_april.scheduler.engine import Engine
from sglang_april.scheduler.ledger import Ledger
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.recorder import Unrecorded
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.version_clock import VersionClock


@dataclass(eq=False)
class Context:
    engine: Engine
    clock: VersionClock
    host_cap_tokens: int
    disk_cap_tokens: int = 0
    store_page: int = 1
    """Tokens of a page of the store."""
    ledger: Ledger = field(default_factory=Ledger)
    recorder: Unrecorded = field(init=False)
    """What writes the journal, if this rank has one; events to the HTTP process pass through it."""
    rounds: dict[str, Round] = field(default_factory=dict)
    """Open rounds by run name, in the order in which they take turns."""
    ahead: dict[str, Round] = field(default_factory=dict)
    """Rounds that are over, by run name, where the run goes on generating until the next (`after_quota: continue`)."""
    tuned: messages.Tuned | None = None
    """The last that was said of `concurrency: auto`."""
    rates: messages.Rates | None = None
    """What `kv: auto` decides by, once rank 0 has broadcast it."""
    step: int = 0
    frozen: bool = False
    """A pause: nothing of ours takes a step."""
    flushing: bool = False
    """A flush waits for stock requests to end."""
    broken: str = ""
    """An exception of ours; no further round is served, SGLang goes on."""
    digest: TextIO | None = None
    """Where a line per step is written with a hash of all decisions so far (rank comparison in tests)."""
    _hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))

    def __post_init__(self) -> None:
        self.recorder = Unrecorded(self.engine)

    def closed(self) -> str:
        """Why no round may be opened, or an empty string."""
        if self.broken:
            return self.broken
        if released := self.engine.memory_released():
            return f"memory is released ({', '.join(released)}): POST /resume_memory_occupation first"
        return self.clock.closed

    def stop_serving(self, reason: str) -> None:
        """An exception of ours. The first one is told at once, past a journal that may never be written again."""
        if not self.broken:
            self.broken = reason
            self.engine.send(messages.Broken(reason))

    def cap(self, tier: CopyTier) -> int:
        """Tokens that a tier may hold."""
        return self.host_cap_tokens if tier == "host" else self.disk_cap_tokens

    def may_step(self) -> bool:
        """Whether samples of ours may take a step."""
        return not (self.frozen or self.flushing or self.closed())

    def round_of(self, sample: Sample) -> Round | None:
        """The open round of the sample's run."""
        return self.rounds.get(sample.group.run.name)

    def active_round(self, sample: Sample) -> Round | None:
        """The round under whose rules the sample runs: the open one, or the last one where its run runs ahead."""
        return self.active_round_of(sample.group.run.name)

    def active_round_of(self, run: str) -> Round | None:
        """The same, by the name of the run."""
        return self.rounds.get(run) or self.ahead.get(run)

    def tunes(self) -> bool:
        """Whether a round is open, or goes on, that leaves its concurrency to us."""
        return any(rnd.spec.concurrency == "auto" for rnd in (*self.rounds.values(), *self.ahead.values()))

    def tune(self, fact: messages.Tuned) -> None:
        """From the next step on; what runs beyond it goes on."""
        self.tuned = fact
        for rnd in (*self.rounds.values(), *self.ahead.values()):
            rnd.tuned = fact

    def must_finish(self, sample: Sample) -> bool:
        rnd = self.round_of(sample) if self.rounds else None
        return rnd is not None and rnd.must_finish(sample.group)

    def trace(self, decision: str, samples: list[Sample]) -> None:
        """Note a scheduling decision; every rank must note the same ones (S9)."""
        if self.digest is not None and samples:
            names = ",".join(f"{s.group.order}.{s.index}" for s in samples)
            self._hash.update(f"{self.step} {decision} {names};".encode())

    def write_digest(self) -> None:
        if self.digest is not None:
            self.digest.write(f"{self.step} {self._hash.hexdigest()}\n")
            self.digest.flush()
