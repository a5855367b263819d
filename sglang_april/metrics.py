"""What the server counts, and its Prometheus exposition: `GET /metrics`, with or without SGLang's --enable-metrics.

Counters and histograms rise with every reply, push and audited sample. Gauges of the moment come from the state of the
scheduler, which a scrape asks for, so nothing is measured without scrapes.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sglang_april.http.reply import Reply

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

PREFIX = "sglang_april:"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
MINUTES = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1200, 3600)
VERSIONS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
LAST_ROUNDS = 20


class Metrics:
    def __init__(self, model_name: str = "") -> None:
        """`model_name`, SGLang's label, is set on every metric."""
        # SGLang sets the multiprocess directory at start, and prometheus_client reads it when it is imported.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.last_rounds: deque[dict[str, Any]] = deque(maxlen=LAST_ROUNDS)
        """Summaries of the rounds that ended last, the latest first; for `GET /april/state`."""
        self.registry = CollectorRegistry()
        labels = self._labels = {"model_name": model_name}

        def counter(name: str, text: str, *more: str) -> Counter:
            metric = Counter(PREFIX + name, text, [*labels, *more], registry=self.registry)
            return metric if more else metric.labels(**labels)  # so that it is 0 before the first event

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(PREFIX + name, text, list(labels), buckets=buckets, registry=self.registry)
            return metric.labels(**labels)

        def gauge(name: str, text: str, *more: str) -> Gauge:
            names = [*labels, *more]
            return Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent", registry=self.registry)

        self._rounds = counter("rounds", "Rounds by end reason.", "end_reason")
        self._samples = counter("delivered_samples", "Samples in replies.")
        self._tokens = counter("delivered_tokens", "Output tokens in replies, by provenance.", "kv")
        self._after = counter("tokens_after_quota", "Decode tokens computed after a quota was met.")
        self._again = counter("reprefilled_tokens", "Tokens prefilled again to resume partials.")
        self._decided = counter(
            "kv_decisions", "Decisions of kv auto about partials on older KV, by reason.", "decision", "why"
        )
        self._mismatches = counter("mismatched_legs", "Legs whose prompts continue no ended leg of their trajectories.")
        self._audits = counter("audited_samples", "Samples that the audit rescored, by outcome.", "outcome")
        self._seconds = histogram("round_seconds", "Duration of a round, from its opening to its end.", MINUTES)
        self._latency = histogram("quota_to_reply_seconds", "Time from the met quota to the complete reply.", SECONDS)
        self._pushes = histogram("push_seconds", "Duration of a push, from push/begin to push/end.", MINUTES)
        self._staleness = histogram(
            "sample_staleness", "Policy version of the reply minus that of a delivered sample's oldest token.", VERSIONS
        )
        self._difference = histogram(
            "audit_logprob_difference",
            "Difference between drawn and rescored logprobs of an audited sample.",
            DIFFERENCES,
        )
        self._carried = gauge("carried", "Carry of the latest round.", "what")
        self._carried_tokens = gauge("carried_tokens", "KV tokens of partials after the latest round.", "tier")
        self._carried_bytes = gauge("carried_bytes", "KV bytes of partials after the latest round.", "tier")

    def audited(self, outcome: str, difference: float) -> None:
        """Count one sample of the audit: `ok`, `finding` or `discarded`."""
        self._audits.labels(**self._labels, outcome=outcome).inc()
        if outcome != "discarded":
            self._difference.observe(difference)

    def leg_ended(self, *, mismatch: bool) -> None:
        """Count one leg of a trajectory."""
        self._mismatches.inc(mismatch)

    def pushed(self, seconds: float) -> None:
        """Count one push."""
        self._pushes.observe(seconds)

    def observe(self, reply: Reply) -> None:
        """Count one round."""
        labels, stats, carried = self._labels, reply.stats, reply.carried
        self.last_rounds.appendleft(_summary(reply))
        self._rounds.labels(**labels, end_reason=reply.end_reason).inc()
        self._samples.inc(stats["delivered"]["samples"])
        for kv, tokens in stats["delivered"]["tokens_by_kv"].items():
            self._tokens.labels(**labels, kv=kv).inc(tokens)
        for staleness, samples in stats["delivered"]["samples_by_staleness"].items():
            for _ in range(samples):
                self._staleness.observe(int(staleness))
        self._after.inc(stats.get("tokens_after_quota", 0))
        self._again.inc(stats.get("reprefilled_tokens", 0))
        for decision, reasons in stats.get("kv_decisions", {}).items():
            for why, samples in reasons.items():
                self._decided.labels(**labels, decision=decision, why=why).inc(samples)
        if "duration_s" in stats:
            self._seconds.observe(stats["duration_s"])
        if "quota_to_built_s" in stats:
            self._latency.observe(stats["quota_to_built_s"])
        for what in ("groups", "samples", "tokens"):
            self._carried.labels(**labels, what=what).set(carried.get(what, 0))
        for gauge, field in ((self._carried_tokens, "tokens_by_tier"), (self._carried_bytes, "bytes")):
            for tier, size in (carried.get(field) or {}).items():
                gauge.labels(**labels, tier=tier).set(size)

    def exposition(self, state: Mapping[str, Any] | None) -> bytes:
        """All metrics in Prometheus's text format. `state`: of `GET /april/state`; None without an answer.

        With --enable-metrics, SGLang's processes write their metrics to a directory, from which all are read together.
        """
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess

        counted = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            counted = CollectorRegistry()
            multiprocess.MultiProcessCollector(counted)
        live = CollectorRegistry(auto_describe=False)
        live.register(_Families(list(_live(self._labels, state))))
        return generate_latest(counted) + generate_latest(live)


class _Families:
    def __init__(self, families: list["GaugeMetricFamily"]) -> None:
        self._families = families

    def collect(self) -> list["GaugeMetricFamily"]:
        return self._families


def _summary(reply: Reply) -> dict[str, Any]:
    delivered, stats = reply.stats["delivered"], reply.stats
    return {
        "round_id": reply.round_id,
        "run": reply.run,
        "end_reason": reply.end_reason,
        "policy_version": reply.policy_version,
        "groups": delivered.get("trajectories", delivered["groups"]),
        **{name: delivered[name] for name in ("samples", "tokens", "samples_by_staleness")},
        **{name: stats.get(name) for name in ("t_ended", "duration_s", "mean_running")},
    }


def _live(labels: Mapping[str, str], state: Mapping[str, Any] | None) -> Iterator["GaugeMetricFamily"]:
    """The gauges of the moment."""
    from prometheus_client.core import GaugeMetricFamily

    def family(name: str, text: str, values: Mapping[str, float], label: str = "") -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=[*labels, *([label] if label else [])])
        for value_of, value in values.items():
            gauge.add_metric([*labels.values(), *([value_of] if label else [])], value)
        return gauge

    def single(name: str, text: str, value: float) -> GaugeMetricFamily:
        return family(name, text, {"": value})

    yield single(
        "scheduler_answers", "Whether the scheduler answered this scrape; if not, gauges are missing.", bool(state)
    )
    if not state:
        return
    yield family("samples", "Undelivered samples by state.", state["samples"], "state")
    yield family(
        "partial_tokens",
        "KV tokens of suspended samples and parked legs; none: output tokens only.",
        state["tokens"],
        "tier",
    )
    yield family("partial_bytes", "KV bytes of suspended samples and parked legs.", state["bytes"], "tier")
    yield single("carry_tokens", "Undelivered output tokens.", state["carry_tokens"])
    yield single(
        "carry_cap_tokens",
        "Limit of undelivered output tokens, at which prompts are refused.",
        state["carry_cap_tokens"],
    )
    yield single(
        "oldest_staleness", "Largest staleness of an undelivered group.", max(map(int, state["staleness"]), default=0)
    )
    yield single("open_rounds", "Rounds that the scheduler has open.", len(state["rounds"]))
    pending = sum(run["samples"] for run in state["attached"].values())
    yield single("attached_requests", "Pending attached requests, legs of trajectories included.", pending)
    runs = state["trajectories"].values()
    by_state = {name: sum(run[name] for run in runs) for name in ("undelivered", "done")}
    yield family("trajectories", "Undelivered trajectories, and those of them that are done.", by_state, "state")
    yield single("push_open", "Whether a push has begun and not ended.", state["push_open"])
    yield single(
        "closed",
        "Whether rounds are refused: push, released memory, failed or unnamed weights, shutdown.",
        bool(state["closed"]),
    )
    yield single("policy_version", "Policy version of the weights.", state["policy_version"])
    if journal := state["journal"]:
        yield single("journal_ok", "Whether the journal can be written.", not journal["fault"])
        yield single("journal_bytes", "Size of the journal's files.", journal["bytes"])
        yield single("journal_waiting_batches", "Batches of records that are not yet written.", journal["waiting"])
        yield single("journal_lag_seconds", "Age of the oldest batch that is not yet written.", journal["lag_s"])
