"""Prometheus metrics next to SGLang's own, in the same multiprocess directory; only with --enable-metrics."""

from collections.abc import Mapping

from sglang_april.http.reply import Reply

PREFIX = "sglang_april:"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)


class Metrics:
    """Updated with every reply. `labels`, such as SGLang's `model_name`, are set on every metric."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        # SGLang sets the multiprocess directory at start, and prometheus_client reads it when it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        names, self._labels = list(labels), dict(labels)
        self._rounds = Counter(PREFIX + "rounds", "Rounds by how they ended.", [*names, "end_reason"])
        self._samples = Counter(PREFIX + "delivered_samples", "Samples in replies.", names)
        self._tokens = Counter(PREFIX + "delivered_tokens", "Output tokens in replies, by provenance.", [*names, "kv"])
        self._after = Counter(PREFIX + "tokens_after_quota", "Decode tokens computed after a quota was met.", names)
        self._again = Counter(PREFIX + "reprefilled_tokens", "Tokens prefilled again to resume partials.", names)
        self._decided = Counter(
            PREFIX + "kv_decisions", "Partials on older KV that kv auto judged, and why.", [*names, "decision", "why"]
        )
        self._latency = Histogram(
            PREFIX + "quota_to_reply_seconds", "From the quota met to the reply built.", names, buckets=SECONDS
        )

        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(PREFIX + name, text, [*names, *more], multiprocess_mode="mostrecent")

        self._audits = Counter(
            PREFIX + "audited_samples", "Samples that the audit rescored, by outcome.", [*names, "outcome"]
        )
        self._difference = Histogram(
            PREFIX + "audit_logprob_difference",
            "Difference between drawn and rescored logprobs of an audited sample.",
            names,
            buckets=DIFFERENCES,
        )
        self._carried = gauge("carried", "What the latest round left for the next.", "what")
        self._carried_bytes = gauge("carried_bytes", "KV bytes of partials after the latest round.", "tier")
        self._version = gauge("policy_version", "Policy version at the end of the latest round.")

    def audited(self, outcome: str, difference: float) -> None:
        """Count one sample of the audit: `ok`, `finding` or `discarded`."""
        self._audits.labels(**self._labels, outcome=outcome).inc()
        if outcome != "discarded":
            self._difference.labels(**self._labels).observe(difference)

    def observe(self, reply: Reply) -> None:
        """Count one round."""
        labels, stats, carried = self._labels, reply.stats, reply.carried
        self._rounds.labels(**labels, end_reason=reply.end_reason).inc()
        self._samples.labels(**labels).inc(stats["delivered"]["samples"])
        for kv, tokens in stats["delivered"]["tokens_by_kv"].items():
            self._tokens.labels(**labels, kv=kv).inc(tokens)
        self._after.labels(**labels).inc(stats.get("tokens_after_quota", 0))
        self._again.labels(**labels).inc(stats.get("reprefilled_tokens", 0))
        for decision, reasons in stats.get("kv_decisions", {}).items():
            for why, samples in reasons.items():
                self._decided.labels(**labels, decision=decision, why=why).inc(samples)
        if "quota_to_built_s" in stats:
            self._latency.labels(**labels).observe(stats["quota_to_built_s"])
        for what in ("groups", "samples", "tokens"):
            self._carried.labels(**labels, what=what).set(carried.get(what, 0))
        for tier, size in (carried.get("bytes") or {}).items():
            self._carried_bytes.labels(**labels, tier=tier).set(size)
        self._version.labels(**labels).set(reply.policy_version)
