"""The online audit: some finished samples of each version are rescored by a plain prefill (`audited-logprobs`).

A sample's logprobs on `fresh` or `recomputed` KV of the current version are those of a plain forward under it. Damaged
KV, a wrong cache hit or a wrong span breaks this equality, and no other check detects it. The prefill is a stock
request with a separate cache key, so it never reads the sample's pages. One runs at a time, for at most `SHARE` of the
time while samples run, and whatever changes weights or memory ends it first (`Audit.paused`).
"""

import asyncio
import logging
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_april.api import messages
from sglang_april.config import AprilConfig
from sglang_april.http.frontend import Frontend
from sglang_april.http.scheduler_rpc import SchedulerRpc

SHARE = 0.02
"""Largest share of the time that audits take while rollout samples run."""
POLL_S = 0.2
WINDOW = 16
"""Consecutive tokens over which a difference is averaged: one token's noise is many times that of a mean."""
KEPT_FINDINGS = 32
TOLERANCE = {"float32": 1e-3}
HALF_PRECISION = 0.1

OnAudit = Callable[[str, float], None]
"""Called with the outcome of each rescored sample (`ok`, `finding`, `discarded`) and its difference."""

logger = logging.getLogger("sglang_april")


@dataclass(frozen=True)
class Candidate:
    """A finished sample that a plain prefill can rescore."""

    sample: messages.FinishedSample
    prompt: messages.Prompt
    temperature: float
    positions: npt.NDArray[np.int64]
    """Output tokens to compare, ascending."""

    def request(self) -> tuple[list[int], int]:
        """Tokens to prefill, and the position from which on logprobs are needed: one before the first to compare."""
        prompt, output = (np.frombuffer(x, "<i4") for x in (self.prompt.input_ids, self.sample.output_ids))
        ids = np.concatenate([prompt, output[: self.positions[-1] + 1]])
        return ids.tolist(), len(prompt) + int(self.positions[0]) - 1

    def compare(self, rescored: list[float]) -> tuple[float, int]:
        """The largest mean of `WINDOW` absolute differences, and the output token at which that window starts.

        Args:
            rescored: logprobs of the output tokens from the first to the last position.
        """
        drawn = np.frombuffer(self.sample.logprobs, "<f4").astype(np.float64)[self.positions]
        again = np.array(rescored, np.float64)[self.positions - self.positions[0]]
        differences = np.nan_to_num(np.abs(drawn - again), nan=np.inf)
        width = min(WINDOW, len(differences))
        means = np.lib.stride_tricks.sliding_window_view(differences, width).mean(axis=1)
        worst = int(np.argmax(means))
        return float(means[worst]), int(self.positions[worst])


def candidate_of(sample: messages.FinishedSample, prompt: messages.Prompt, longest: int) -> Candidate | str:
    """The sample as a candidate, or why a plain prefill cannot rescore it.

    Args:
        longest: tokens that a prompt of the server may have.
    """
    if isinstance(prompt.rescore, str):
        return prompt.rescore
    version = sample.spans[-1].version
    spans = [range(s.start, s.end) for s in sample.spans if s.version == version and s.kv in ("fresh", "recomputed")]
    if not spans:
        return "kept KV"
    limit = min(longest - len(prompt.input_ids) // 4, len(sample.logprobs) // 4)
    positions = np.concatenate([np.asarray(span, np.int64) for span in spans])
    positions = positions[positions < limit]
    return Candidate(sample, prompt, prompt.rescore, positions) if positions.size else "length"


class Audit:
    """Chooses, rescores and compares samples on the event loop of the HTTP process."""

    def __init__(self, engine: Frontend, rpc: SchedulerRpc, config: AprilConfig, observe: OnAudit | None) -> None:
        self._engine, self._rpc, self._observe = engine, rpc, observe
        self._wanted, self._strict = config.audit, config.audit_strict
        self._given_tolerance = config.audit_tolerance
        self._random = random.Random(0)  # noqa: S311 - not a secret
        self._version = -1
        self._eligible = 0
        """Samples of this version that a prefill can rescore, chosen or not."""
        self._chosen: list[Candidate | None] = []
        """A uniform choice among them (reservoir sampling); None once rescored."""
        self._pauses = 0
        self._worker: asyncio.Task[None] | None = None
        self._rescoring: asyncio.Task[list[float]] | None = None
        self._busy = False
        """A sample is being rescored, or its result is not judged yet."""
        self._rid = ""
        self._audited = self._tokens = self._discarded = 0
        self._largest = 0.0
        self._skipped: Counter[str] = Counter()
        self._findings: deque[dict[str, Any]] = deque(maxlen=KEPT_FINDINGS)
        self._found = 0
        self.refusal = ""
        """With --april-audit-strict, why no round may open; empty if one may."""

    @property
    def tolerance(self) -> float:
        """The largest difference that is attributed to noise."""
        if self._given_tolerance is not None:
            return self._given_tolerance
        return TOLERANCE.get(self._engine.server_info().dtype, HALF_PRECISION)

    def offer(self, sample: messages.FinishedSample, prompt: messages.Prompt) -> None:
        """Offer a finished sample, which is chosen with the same probability as every other of its version."""
        if not self._wanted or not sample.spans or sample.spans[-1].version < self._version:
            return
        self._move_to(sample.spans[-1].version)
        info = self._engine.server_info()
        candidate = candidate_of(sample, prompt, min(info.max_input_len, info.context_len) - 1)
        if isinstance(candidate, str):
            self._skipped[candidate] += 1
            return
        self._eligible += 1
        if len(self._chosen) < self._wanted:
            self._chosen.append(candidate)
        elif (place := self._random.randrange(self._eligible)) < self._wanted and self._chosen[place] is not None:
            self._chosen[place] = candidate
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No audit runs: the one in flight is aborted, which takes at most one step of the scheduler. None begins under
        a pause, in which SGLang holds it back, and its abort has no effect.
        """
        self._pauses += 1
        try:
            if (rescoring := self._rescoring) is not None:
                await asyncio.sleep(0)  # SGLang knows the request once its task has begun
                self._engine.abort(self._rid)
                await asyncio.wait([rescoring])
            yield
        finally:
            self._pauses -= 1

    def acknowledge(self) -> dict[str, Any]:
        """Acknowledge the findings, so that rounds may open again."""
        self.refusal = ""
        return self.state()

    def state(self) -> dict[str, Any]:
        """The audit's part of `GET /april/state`."""
        return {
            "samples_per_version": self._wanted,
            "tolerance": self.tolerance,
            "audited": self._audited,
            "audited_tokens": self._tokens,
            "waiting": sum(candidate is not None for candidate in self._chosen) + self._busy,
            "largest_difference": self._largest,
            "discarded": self._discarded,
            "skipped": dict(self._skipped),
            "found": self._found,
            "findings": list(self._findings),
            "refusal": self.refusal,
        }

    def _move_to(self, version: int) -> None:
        """Discard candidates of an older version, because its weights have been replaced."""
        if version > self._version:
            for _ in filter(None, self._chosen):
                self._discard()
            self._version, self._eligible, self._chosen = version, 0, []

    def _discard(self) -> None:
        self._discarded += 1
        if self._observe is not None:
            self._observe("discarded", 0.0)

    async def _work(self) -> None:
        """Rescore the chosen samples one after the other, until none is left."""
        rest_until = 0.0
        try:
            while any(self._chosen):
                state = await self._scheduler()
                self._move_to(state["policy_version"])
                resting = state["running"] and time.monotonic() < rest_until
                if state["closed"] or state["frozen"] or self._pauses or resting:
                    await asyncio.sleep(POLL_S)
                elif waiting := [place for place, candidate in enumerate(self._chosen) if candidate is not None]:
                    began, self._busy = time.monotonic(), True
                    try:
                        await self._rescore(self._random.choice(waiting))
                    finally:
                        self._busy = False
                    ended = time.monotonic()
                    rest_until = ended + (ended - began) * (1 / SHARE - 1)
        except Exception:
            logger.exception("the audit stopped until the next sample finishes")

    async def _scheduler(self) -> dict[str, Any]:
        return (await self._rpc.call(messages.GetState(self._rpc.number(), brief=True))).data

    async def _rescore(self, place: int) -> None:
        candidate, version = self._chosen[place], self._version
        assert candidate is not None
        self._chosen[place] = None
        ids, start = candidate.request()
        self._rid = uuid.uuid4().hex
        self._rescoring = asyncio.ensure_future(self._engine.rescore(self._rid, ids, start, candidate.temperature))
        try:
            rescored = await self._rescoring
        except ValueError as error:
            logger.info("an audit was discarded: %s", error)
            rescored = None
        finally:
            self._rescoring = None
        if rescored is None or (await self._scheduler())["policy_version"] != version:
            self._discard()
        else:
            self._judge(candidate, version, *candidate.compare(rescored))

    def _judge(self, candidate: Candidate, version: int, difference: float, position: int) -> None:
        self._audited += 1
        self._tokens += len(candidate.positions)
        self._largest = max(self._largest, difference)
        found = not difference <= self.tolerance
        if self._observe is not None:
            self._observe("finding" if found else "ok", difference)
        if not found:
            return
        sample = candidate.sample
        self._found += 1
        self._findings.append(
            {
                "run": sample.run,
                "id": sample.id,
                "incarnation": sample.incarnation,
                "index": sample.index,
                "version": version,
                "token": position,
                "difference": difference,
                "at": time.time(),
            }
        )
        reason = (
            f"the audit found sample {sample.index} of prompt {sample.id!r} of run {sample.run!r} wrong from output "
            f"token {position} on: its logprobs differ from a plain prefill under version {version} by "
            f"{difference:.4g} a token, more than {self.tolerance:.4g}"
        )
        logger.warning("%s", reason)
        if self._strict:
            self.refusal = f"{reason}; POST /april/audit/ack lets rounds open again"
