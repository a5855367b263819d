"""The scheduler's statistics of one round.

Clocks are read here for reporting only; no decision depends on one (`rank-determinism`).
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

TIMELINE_POINTS = 2000
"""A longer timeline is thinned to every second point."""


@dataclass(eq=False, slots=True)
class Timeline:
    """Running samples of a run over time: one point per change, thinned when there are too many."""

    points: list[tuple[float, int]] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    _area: float = 0.0
    _last: tuple[float, int] = (0.0, 0)

    def note(self, running: int) -> None:
        now = time.monotonic() - self.start
        then, before = self._last
        self._area += (now - then) * before
        self._last = (now, running)
        if running == before and self.points:
            return
        self.points.append((now, running))
        if len(self.points) > TIMELINE_POINTS:
            self.points = self.points[::2]

    def mean(self) -> float:
        """Running samples, averaged over time up to the last `note`."""
        return self._area / self._last[0] if self._last[0] > 0 else 0.0


@dataclass(eq=False, slots=True)
class RoundStats:
    """Counted while the round is open; `report` is what the reply's `stats` contain from the scheduler."""

    timeline: Timeline = field(default_factory=Timeline)
    t_opened: float = field(default_factory=time.time)
    t_quota_met: float | None = None
    tokens_generated: int = 0
    tokens_after_quota: int = 0
    reprefilled_tokens: int = 0
    carried_in: dict[str, int] = field(default_factory=dict)
    resumed_kept: int = 0
    resumed_recomputed: int = 0
    started: int = 0
    started_on_prompt_kv: int = 0
    """Of these, samples that needed no prefill: another member of the group had computed the prompt's KV."""
    retracted: int = 0
    suspended_for_memory: int = 0
    kv_fallback: int = 0
    kv_lost: int = 0
    """Partials whose stored KV could not be written or did not verify, since the run's last round."""
    kept: Counter[str] = field(default_factory=Counter)
    """`kv: auto`: samples resumed on KV of an older version, by the tier it was in."""
    recomputed: Counter[str] = field(default_factory=Counter)
    """`kv: auto`: samples that were prefilled again, by reason."""
    over_bound: int = 0
    prolonged: bool = False
    """The quota was reached, and groups that must finish were not whole yet."""
    pushes: int = 0
    ahead: "RoundStats | None" = None
    """Statistics of the run between the last reply and this round (`after_quota: continue`)."""
    warnings: list[str] = field(default_factory=list)

    def quota_met(self) -> None:
        if self.t_quota_met is None:
            self.t_quota_met = time.time()

    def quota_not_met(self) -> None:
        """The quota was met, but a group must finish first: the round continues."""
        self.t_quota_met, self.tokens_after_quota = None, 0

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def counters(self) -> dict[str, Any]:
        """The counters that apply while no round is open."""
        names = ("tokens_generated", "reprefilled_tokens", "started", "resumed_kept", "resumed_recomputed", "retracted")
        return {"seconds": time.time() - self.t_opened, **{name: getattr(self, name) for name in names}}

    def report(self, carried_out: dict[str, Any]) -> dict[str, Any]:
        self.timeline.note(0)
        ended = time.time()
        return {
            "t_opened": self.t_opened,
            "t_quota_met": self.t_quota_met if self.t_quota_met is not None else ended,
            "t_ended": ended,
            "duration_s": ended - self.t_opened,
            "tokens_generated": self.tokens_generated,
            "tokens_after_quota": self.tokens_after_quota,
            "reprefilled_tokens": self.reprefilled_tokens,
            "carried_in": self.carried_in,
            "carried_out": {k: carried_out[k] for k in ("groups", "samples", "tokens")},
            "resumed_kept": self.resumed_kept,
            "resumed_recomputed": self.resumed_recomputed,
            "started": self.started,
            "started_on_prompt_kv": self.started_on_prompt_kv,
            "retracted": self.retracted,
            "suspended_for_memory": self.suspended_for_memory,
            "kv_fallback": self.kv_fallback,
            "kv_lost": self.kv_lost,
            "kv_decisions": {"keep": dict(self.kept), "recompute": dict(self.recomputed)},
            "over_bound": self.over_bound,
            "prolonged": self.prolonged,
            "pushes": self.pushes,
            "ahead": self.ahead.counters() if self.ahead is not None else None,
            "mean_running": self.timeline.mean(),
            "timeline": [[round(t, 6), n] for t, n in self.timeline.points],
            "warnings": self.warnings,
        }
