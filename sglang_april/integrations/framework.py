"""The parts of slime, or of its fork miles, that the rollout functions use, and conversion of samples."""

import asyncio
import copy
import importlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_april.client.types import RolloutGroup, RolloutSample

Sample = Any
"""slime's or miles's `Sample`."""
PARAMETERS = {
    "temperature": "rollout_temperature",
    "top_k": "rollout_top_k",
    "max_new_tokens": "rollout_max_response_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
    "skip_special_tokens": "rollout_skip_special_tokens",
}
"""Sampling parameters by the trainer's arguments; None is left out."""


class Framework:
    """Modules of the trainer, imported by name at the first rollout."""

    def __init__(self, package: str) -> None:
        """`package`: `slime`, or `miles`."""
        self.package = package
        self.Sample = self._module("utils.types").Sample
        self.TrainOutput = self._module("rollout.base_types").RolloutFnTrainOutput
        self.filters = self._module("rollout.filter_hub.base_types")
        self.load_function = self._module("utils.misc").load_function
        self.run = self._module("utils.async_utils").run

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def evaluate(self, *args: Any) -> Any:
        """The trainer's own rollout function, for evaluation."""
        return self._module("rollout.sglang_rollout").generate_rollout(*args, evaluation=True)

    def tokenizer(self, args: Namespace) -> Any:
        return self._module("utils.processing_utils").load_tokenizer(args.hf_checkpoint, trust_remote_code=True)

    # --- sampling and rewards

    def sampling_params(self, args: Namespace) -> dict[str, Any]:
        """Sampling parameters of all prompts of a round."""
        given = {name: getattr(args, argument, None) for name, argument in PARAMETERS.items()}
        params = {name: value for name, value in given.items() if value is not None}
        params |= {"no_stop_trim": True, "spaces_between_special_tokens": False}
        if getattr(args, "sglang_enable_deterministic_inference", False):
            params["sampling_seed"] = args.rollout_seed
        return params

    async def reward(self, args: Namespace, group: list[Sample]) -> list[Sample]:
        """Apply the sample hooks, then the reward function of the arguments to the samples that have no reward yet."""
        if getattr(args, "rollout_sample_hook_path", None):
            group = await self._module("rollout.sample_hooks").apply_rollout_sample_hooks(args, group, evaluation=False)
        rewards = self._module("rollout.rm_hub")
        if args.group_rm:
            unrewarded, values = group, await rewards.batched_async_rm(args, group)
        else:
            unrewarded = [sample for sample in group if sample.reward is None]
            values = await asyncio.gather(*(rewards.async_rm(args, sample) for sample in unrewarded))
        for sample, value in zip(unrewarded, values, strict=True):
            sample.reward = value
        return group

    def drop_reason(self, args: Namespace, group: list[Sample], remaining: int) -> str | None:
        """Why the dynamic filter drops the group; None if it stays, empty for a filter without reasons."""
        path = args.dynamic_sampling_filter_path
        verdict = self.filters.call_dynamic_filter(self.load_function(path) if path else None, args, group)
        if verdict.keep:
            return None
        rescued = getattr(verdict, "keep_when_insufficient", False) and remaining <= args.rollout_batch_size
        return None if rescued else (verdict.reason or "")

    # --- groups to prompts and back

    @staticmethod
    def prompt_id(group: Sequence[Sample]) -> str:
        """The id of a group at the engines. Data sources may set no `group_index`: slime's rollouts do not read it.

        Raises:
            ValueError: the samples have no index either.
        """
        first = group[0]
        if first.group_index is not None:
            return str(first.group_index)
        if first.index is None:
            raise ValueError("sglang_april: the samples of --data-source-path have neither group_index nor index")
        return f"sample-{first.index}"

    def to_prompt(self, group: Sequence[Sample], tokenizer: Any, rollout_id: int) -> dict[str, Any]:
        """The prompt of a group. Its metadata rebuilds the samples, in any process.

        Raises:
            ValueError: the group has parts that a prompt cannot carry.
        """
        first, name = group[0], self.prompt_id(group)
        if not isinstance(first.prompt, str):
            raise ValueError(f"group {name}: the prompt must be text (--apply-chat-template)")
        if any(value is not None for value in (first.multimodal_inputs or {}).values()):
            raise ValueError(f"group {name}: multimodal inputs are not supported")
        for field in ("tokens", "generate_function_path"):
            if getattr(first, field, None):
                raise ValueError(f"group {name}: {field} of a sample is not supported")
        if any({**sample.to_dict(), "index": first.index} != first.to_dict() for sample in group):
            raise ValueError(f"group {name}: its samples differ in more than the index")
        fields = self.Sample(prompt=first.prompt).to_dict()
        saved = {name: value for name, value in first.to_dict().items() if value != fields.get(name)}
        metadata = {"sample": saved, "indices": [sample.index for sample in group], "rollout_id": rollout_id}
        try:
            msgspec.json.encode(metadata)
        except TypeError as error:
            raise ValueError(f"group {name} cannot be sent through the engine: {error}") from error
        return {
            "id": name,
            "input_ids": tokenizer.encode(first.prompt, add_special_tokens=False),
            "n": len(group),
            "metadata": {**metadata, "prompt": first.prompt},
        }

    def to_group(self, args: Namespace, group: RolloutGroup, version: int, tokenizer: Any) -> list[Sample]:
        """The samples of a finished group, in the trainer's form; `version` is the current policy version."""
        return [self._to_sample(args, group, drawn, version, tokenizer) for drawn in group.samples]

    def _to_sample(
        self, args: Namespace, group: RolloutGroup, drawn: RolloutSample, version: int, tokenizer: Any
    ) -> Sample:
        saved = group.metadata
        fields = {**self.Sample(prompt=saved["prompt"]).to_dict(), **copy.deepcopy(saved["sample"])}
        sample = self.Sample.from_dict({**fields, "index": saved["indices"][drawn.index]})
        ids = drawn.output_ids.tolist()
        sample.tokens = [*group.prompt_ids.tolist(), *ids]
        sample.response = drawn.text if drawn.text is not None else tokenizer.decode(ids)
        sample.response_length = len(ids)
        sample.rollout_log_probs = drawn.logprobs.tolist()
        sample.weight_versions = [str(span.version) for span in drawn.spans]
        sample.loss_mask = [1] * len(ids)
        stale = [span for span in drawn.spans if span.version < version]
        if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
            for span in stale:
                sample.loss_mask[span.start : span.end] = [0] * (span.end - span.start)
        if stale:
            sample.metadata.setdefault("start_rollout_id", saved["rollout_id"])
        reason = drawn.finish_reason["type"]
        status = self.Sample.Status
        sample.status = {"stop": status.COMPLETED, "length": status.TRUNCATED}.get(reason, status.ABORTED)
        return sample
