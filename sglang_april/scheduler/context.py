"""State shared by the parts of the scheduler side: one per scheduler process, replicated on every TP rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sglang_april.api import messages
from sglang_april.api.run_keys import RunKind, run_key
from sglang_april.api.types import MAX_RUNS
from sglang_april.kv.kv_pages import CopyTier
from sglang_april.recovery.journal_snapshot import SnapshotGroup
from sglang_april.scheduler.decisions import Decisions
from sglang_april.scheduler.engine import Engine
from sglang_april.scheduler.ledger import Ledger
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.recorder import Unrecorded
from sglang_april.scheduler.reservations import Reservations
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Sample, State
from sglang_april.scheduler.trajectory_run import TrajectoryRun
from sglang_april.scheduler.version_clock import VersionClock

NO_CAP = 2**62


@dataclass(eq=False)
class Context:
    engine: Engine
    clock: VersionClock
    host_cap_tokens: int
    disk_cap_tokens: int = 0
    store_page: int = 1
    """Tokens of a page of the store."""
    carry_cap_tokens: int = 2**31 - 1
    """Undelivered output tokens from which on no new prompts are accepted."""
    ledger: Ledger = field(default_factory=Ledger)
    reservations: Reservations = field(default_factory=Reservations)
    recorder: Unrecorded = field(init=False)
    """Sends events to the HTTP process and, where this rank has a journal, writes it."""
    rounds: dict[str, Round] = field(default_factory=dict)
    """Open rounds by the key of their run."""
    ahead: dict[str, Round] = field(default_factory=dict)
    """Likewise, rounds that have ended and whose run generates until its next one (`after_quota: continue`)."""
    attached: dict[str, Round] = field(default_factory=dict)
    """Likewise, the rules under which attached requests run; nothing ends such a round."""
    trajectories: dict[str, TrajectoryRun] = field(default_factory=dict)
    """Trajectories by the name that their callers give the run."""
    park_cap_tokens: int = NO_CAP
    """Tokens of KV that ended legs may keep for the next ones."""
    saved_attached: dict[tuple[str, str], SnapshotGroup] = field(default_factory=dict)
    """After a restart, by key of the run and `rid`: attached requests in the journal that have not been sent again."""
    attached_kv: messages.KvPolicy = "auto"
    """KV policy of attached requests of a run that has opened no round."""
    kv_of_run: dict[str, messages.KvPolicy] = field(default_factory=dict)
    """KV policy of the latest round of each run, by the name that callers give it; the latest run is the last."""
    audited: bool = False
    """Whether the HTTP process audits samples, attached requests included."""
    journalled: bool = False
    """Whether the server has a journal, which rank 0 writes."""
    tuned: messages.Tuned | None = None
    """The current limit for `concurrency: auto`, with the step times that it is based on."""
    rates: messages.Rates | None = None
    """Measured rates for `kv: auto`, once rank 0 has broadcast them."""
    step: int = 0
    frozen: bool = False
    """A pause: no rollout sample takes a step."""
    closing: str = ""
    """Why the server is about to end, or empty."""
    flushing: bool = False
    """A flush is waiting for stock requests to end."""
    decisions: Decisions | None = None
    """The digest of all decisions, which ranks compare; None if there is only one rank."""

    def __post_init__(self) -> None:
        self.recorder = Unrecorded(self.engine)

    def closed(self) -> str:
        """Why no round may be opened, or an empty string."""
        if self.closing:
            return self.closing
        if released := self.engine.memory_released():
            return f"memory is released ({', '.join(released)}): POST /resume_memory_occupation first"
        return self.clock.closed

    def cap(self, tier: CopyTier) -> int:
        """Tokens that a tier may hold."""
        return self.host_cap_tokens if tier == "host" else self.disk_cap_tokens

    def may_step(self) -> bool:
        """Whether rollout samples may take a step."""
        return not (self.frozen or self.flushing or self.closing or self.engine.memory_released() or self.clock.closed)

    def round_of(self, sample: Sample) -> Round | None:
        """The open round of the sample's run."""
        return self.rounds.get(sample.group.run.key)

    def active_round(self, sample: Sample) -> Round | None:
        """The round under whose rules the sample runs: the open one, or the last one where its run runs ahead."""
        return self.active_round_of(sample.group.run)

    def active_round_of(self, run: Run) -> Round | None:
        """The same, of a run."""
        return self.rounds.get(run.key) or self.ahead.get(run.key) or self.attached.get(run.key)

    def run_of(self, spec: messages.RoundSpec) -> Run:
        """The run whose samples a round counts; it may be new."""
        return self.trajectory_run(spec.run).legs if spec.trajectories else self.ledger.run(spec.run)

    def trajectory_run(self, name: str) -> TrajectoryRun:
        """The trajectories of a run; it may have none yet."""
        if name not in self.trajectories:
            self.trajectories[name] = TrajectoryRun(name, self.new_attached_run("legs", name))
        return self.trajectories[name]

    def new_attached_run(self, kind: RunKind, name: str) -> Run:
        """A run of requests or legs."""
        return Run(name, kind, kv=self.kv_of_run.get(name, self.attached_kv))

    def apply_rules(self, spec: messages.RoundSpec, run: Run) -> None:
        """A round opens: its rules apply to its run from now on, and its `kv` to requests attached to the run.

        Legs follow a round of trajectories only, once there has been one.
        """
        self.kv_of_run.pop(spec.run, None)
        self.kv_of_run[spec.run] = spec.kv
        if len(self.kv_of_run) > MAX_RUNS:
            del self.kv_of_run[next(iter(self.kv_of_run))]
        requests, known = self.ledger.runs.get(run_key("requests", spec.run)), self.trajectories.get(spec.run)
        if requests is not None:
            requests.kv = spec.kv
        if known is not None and not known.rounds_opened:
            known.legs.kv = spec.kv
        run.kv, run.max_staleness = spec.kv, spec.max_staleness

    def count(self, samples: Iterable[Sample]) -> None:
        """Count what the running ones of `samples` have drawn since their last turn (`Controller.progress`)."""
        for sample in samples:
            if sample.state is State.RUNNING and (drawn := self.engine.output_length(sample) - sample.length):
                sample.length += drawn
                self.count_tokens(sample.group.run, drawn)

    def count_tokens(self, run: Run, tokens: int) -> None:
        """Add output tokens to the statistics of the run's current round."""
        if rnd := self.active_round_of(run):
            rnd.stats.tokens_generated += tokens
            if rnd.stats.t_quota_met is not None:
                rnd.stats.tokens_after_quota += tokens

    def quota_met(self, rnd: Round) -> None:
        """From now on, the tokens of the round's run are those after its quota."""
        if rnd.stats.t_quota_met is None:
            self.count(rnd.run.samples(State.RUNNING))
            rnd.stats.quota_met()

    def may_have_work(self) -> bool:
        """Whether some run may let samples step."""
        return bool(self.rounds or self.ahead or self.attached)

    def needs_tuning(self) -> bool:
        """Whether a round with `concurrency: auto` is open or runs ahead."""
        if not self.rounds and not self.ahead:  # a generator takes longer than the rest of an idle step
            return False
        return any(rnd.spec.concurrency == "auto" for rnd in (*self.rounds.values(), *self.ahead.values()))

    def apply_tuning(self, observation: messages.Tuned) -> None:
        """Set the limit from the next step on; samples that run beyond it keep running."""
        self.tuned = observation
        for rnd in (*self.rounds.values(), *self.ahead.values()):
            rnd.tuned = observation

    def must_finish(self, sample: Sample) -> bool:
        rnd = self.round_of(sample) if self.rounds else None
        return rnd is not None and rnd.must_finish(sample.group)

    def trace(self, decision: str, samples: Sequence[Sample] = (), detail: object = None) -> None:
        """Add a scheduling decision to the digest; it must be the same on every rank (`rank-determinism`)."""
        if self.decisions is not None:
            self.decisions.add(decision, samples, detail)
