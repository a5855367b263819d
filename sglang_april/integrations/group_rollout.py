"""One rollout of slime's kind as one round: groups are rewarded and filtered while the others still generate.

The engines count accepted groups, stop in the step that meets `rollout_batch_size`, and keep what is unfinished. So the
data source is asked for `over_sampling_batch_size` less what the engines carry, and nothing is aborted or sent again.
"""

import asyncio
import contextlib
import logging
import os
import uuid
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import httpx

from sglang_april.client.async_engine_pool import AsyncEnginePool
from sglang_april.client.calls import AprilError
from sglang_april.client.client import AprilClient
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.types import RolloutGroup, RolloutSummary
from sglang_april.integrations.framework import Framework, Sample

log = logging.getLogger("sglang_april")

Group = list[Sample]

UNSUPPORTED = {
    "custom_generate_function_path": "sends requests of its own: attach them to a run instead",
    "use_rollout_routing_replay": "is not supported: the engine does not return routed experts",
    "use_rollout_indexer_replay": "is not supported: the engine does not return what an indexer has selected",
    "recompute_logprobs_via_prefill": "is not supported: the logprobs are those of the decode steps",
    "opd_log_prob_top_k": "is not supported: a round returns no top logprobs",
    "use_miles_router": "is not supported: it does not list its engines; use SGLang's router",
}
"""Arguments of slime or miles that a round would ignore."""


def refusal(args: Namespace | None) -> str:
    """Why a round cannot do what these arguments ask for; empty if it can."""
    if args is None:  # slime's contract check of outputs calls so; slime's own function cannot serve that either
        return "args is None: the router, the sizes and the sampling of a rollout are in the trainer's arguments"
    if args.rollout_top_p != 1.0:
        return "--rollout-top-p must be 1: the engine does not return the tokens of the nucleus, which training replays"
    for name, reason in UNSUPPORTED.items():
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')} {reason}"
    return ""


class Rollouts:
    """The rollouts of a process."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._urls: list[str] = []
        self._pool = EnginePool([])
        self._tokenizer: Any = None
        self._inherited: set[str] | None = None
        """Ids of groups that the engines had at the first rollout of this process."""
        self._unsent: list[dict[str, Any]] = []
        """Prompts that the data source has given and no engine has taken."""

    def generate_rollout(self, args: Namespace, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
        if evaluation and args is not None:
            return self._framework.evaluate(args, rollout_id, data_source)
        if reason := refusal(args):
            raise ValueError(f"sglang_april: {reason}")
        self._tokenizer = self._tokenizer or self._framework.tokenizer(args)
        self._connect(args)
        source = data_source.get_samples
        rollout = _Rollout(self._framework, self._pool, self._tokenizer, args, rollout_id, source, self._unsent)
        if self._inherited is None:
            self._inherited = rollout.held()
        output: Any = self._framework.run(rollout.run(self._inherited))
        if args.rollout_sample_filter_path is not None:
            self._framework.load_function(args.rollout_sample_filter_path)(args, output.samples)
        if args.rollout_all_samples_process_path is not None:
            process = self._framework.load_function(args.rollout_all_samples_process_path)
            process(args, rollout.all_groups, source)  # slime passes this method and not the data source
        return output

    def _connect(self, args: Namespace) -> None:
        """Connect to the engines behind the router, which does not forward rounds."""
        router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        answer = httpx.get(f"{router}/workers", timeout=60).raise_for_status()
        urls = sorted(worker["url"] for worker in answer.json()["workers"])
        if urls != self._urls:
            self._urls, self._pool = urls, EnginePool([AprilClient(url, retry_s=60) for url in urls])
        if not urls:
            raise RuntimeError(f"sglang_april: the router at {router} lists no engine")


class _Rollout:
    """One call: from prompts to exactly `rollout_batch_size` groups."""

    def __init__(
        self,
        framework: Framework,
        pool: EnginePool,
        tokenizer: Any,
        args: Namespace,
        rollout_id: int,
        get_samples: Callable[[int], list[Group]],
        unsent: list[dict[str, Any]],
    ) -> None:
        self._framework, self._pool, self._tokenizer = framework, pool, tokenizer
        self._awaitable = AsyncEnginePool(pool)
        self._args, self._rollout_id, self._get_samples, self._unsent = args, rollout_id, get_samples, unsent
        self._run = os.environ.get("SGLANG_APRIL_RUN", framework.package)
        self._round_id = uuid.uuid4().hex  # a run's name may have characters that an id must not
        self._metrics = framework.filters.MetricGatherer()
        self._scored: dict[tuple[str, int], Group] = {}
        self._known: set[str] = set()
        """Ids of groups that the engines have, or that were requested before a restart."""
        self._remaining = 0
        """Number of groups that have been accepted or may still be."""
        self._version = 0

    @property
    def all_groups(self) -> list[Group]:
        """Every group that was rewarded, also dropped ones."""
        return _sorted(list(self._scored.values()))

    def held(self) -> set[str]:
        """Ids of the undelivered groups at the engines."""
        return {row["id"] for row in self._pool.partials(self._run)["groups"]}

    async def run(self, inherited: set[str]) -> Any:
        """Run the round; an exception of a reward or of an engine ends it at the engines, where its groups stay.

        Args:
            inherited: ids that the data source repeats after a restart, and that are not requested twice.
        """
        body = await asyncio.to_thread(self._open, inherited)
        try:
            async with asyncio.TaskGroup() as scoring:
                tasks = []
                async for event in self._awaitable.stream(**body):
                    if isinstance(event, RolloutSummary):
                        summary = event
                        break
                    tasks.append(scoring.create_task(self._judge(event)))
                for task in tasks:  # of groups beyond the quota: the next round streams them again
                    task.cancel()
        except BaseExceptionGroup as errors:
            await asyncio.to_thread(self._stop)
            raise errors.exceptions[0] from None
        except BaseException:
            await asyncio.to_thread(self._stop)
            raise
        for group in summary.groups:
            if group.accepted and (group.id, group.incarnation) not in self._scored:
                await self._score(group)  # accepted before a restart: there was no preview to reward
        return await asyncio.to_thread(self._output, summary)

    # --- begin

    def _open(self, inherited: set[str]) -> dict[str, Any]:
        """The body of the round. Rounds that an earlier process left open end, and their groups are carried."""
        for client in self._pool.clients:
            state = client.state()
            self._version = max(self._version, state["policy_version"])
            for row in state["rounds"]:
                if row["run"] == self._run:
                    client.stop(row["round_id"], deliver=[])
        held = self.held()
        self._known, self._remaining = held | inherited, len(held)
        prompts = self._take(self._args.over_sampling_batch_size - self._remaining)
        return {
            "run": self._run,
            "round_id": self._round_id,
            "prompts": prompts,
            "quota": self._args.rollout_batch_size,
            "count": "accepted",
            "max_staleness": None,  # groups at a bound are delivered beyond the quota; the batch has no place for them
            "sampling_params": self._framework.sampling_params(self._args),
        }

    def _take(self, groups: int) -> list[dict[str, Any]]:
        """So many prompts of the data source. After a restart it repeats some that the engines have: skip them."""
        unsent, groups = [prompt for prompt in self._unsent if prompt["id"] not in self._known], max(groups, 0)
        prompts, self._unsent[:] = unsent[:groups], unsent[groups:]
        while len(prompts) < groups and (drawn := self._get_samples(groups - len(prompts))):
            new = [group for group in drawn if self._framework.prompt_id(group) not in self._known]
            prompts += [self._framework.to_prompt(group, self._tokenizer, self._rollout_id) for group in new]
            self._known |= {prompt["id"] for prompt in prompts}
        self._remaining += len(prompts)
        return prompts

    # --- while it runs

    async def _judge(self, group: RolloutGroup) -> None:
        """Reward and filter a finished group, send the verdict to its engine, and replace it if it is dropped."""
        samples = await self._score(group)
        reason = self._framework.drop_reason(self._args, samples, self._remaining)
        if reason is None:
            await self._send_verdict(accept=[group.id])
            return
        self._metrics.on_dynamic_filter_drop(reason=reason)
        self._remaining -= 1
        if self._remaining < self._args.rollout_batch_size:  # before the verdict, which may end the round
            await self._extend(self._take(self._args.over_sampling_batch_size))
        await self._send_verdict(reject=[group.id])

    async def _send_verdict(self, **verdict: list[str]) -> None:
        try:
            await self._awaitable.judge(self._round_id, **verdict)
        except AprilError as error:
            if error.status != 409:  # the round has met its quota meanwhile: the next one streams the group again
                raise

    async def _extend(self, prompts: list[dict[str, Any]]) -> None:
        """Add prompts to the round. Those that no engine takes, because the round has ended, wait for the next one."""
        try:
            await self._awaitable.extend(self._round_id, prompts=prompts)
        except BaseException as error:
            self._unsent += prompts
            self._remaining -= len(prompts)
            if not isinstance(error, AprilError) or error.status != 409:
                raise

    async def _score(self, group: RolloutGroup) -> Group:
        samples = self._framework.to_group(self._args, group, self._version, self._tokenizer)
        samples = await self._framework.reward(self._args, samples)
        self._scored[group.id, group.incarnation] = samples
        return samples

    def _stop(self) -> None:
        for client in self._pool.clients:
            with contextlib.suppress(AprilError):
                client.stop(self._round_id, deliver=[])

    # --- end

    def _output(self, summary: RolloutSummary) -> Any:
        delivered = [group for group in summary.groups if group.accepted]  # rejected ones are delivered as well
        groups = _sorted([self._scored[group.id, group.incarnation] for group in delivered])
        # An extension that failed may have reached some engines.
        self._unsent[:] = [prompt for prompt in self._unsent if prompt["id"] not in {group.id for group in delivered}]
        if len(groups) != self._args.rollout_batch_size:
            raise RuntimeError(f"{len(groups)} groups were accepted, {self._args.rollout_batch_size} are needed")
        if not self._args.partial_rollout:
            self._pool.drop(self._run)
        tokens = sum(sample.response_length for group in groups for sample in group)
        stale = sum(
            span.end - span.start
            for group in delivered
            for sample in group.samples
            for span in sample.spans
            if span.version < summary.policy_version
        )
        metrics = {
            **self._metrics.collect(),
            "rollout/april/carried_groups": summary.carried["groups"],
            "rollout/april/carried_tokens": summary.carried["tokens"],
            "rollout/april/off_policy_share": stale / max(tokens, 1),
            "rollout/april/reprefilled_tokens": summary.stats.get("reprefilled_tokens", 0),
        }
        return self._framework.TrainOutput(samples=groups, metrics=metrics)


def _sorted(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group[0].index)
