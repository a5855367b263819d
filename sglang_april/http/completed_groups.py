"""The content of undelivered finished samples, from the step in which they finish until a reply contains them.

The scheduler decides which samples count, are delivered or are dropped; this store only follows its messages. It exists
because the scheduler sends the content of a sample once (`messages.Finished`) and does not keep it.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from sglang_april.api.messages import Delivery, FinishedSample, Prompt


class MissingSampleError(LookupError):
    """The scheduler names a sample whose content never arrived: a fault of the server, never of a caller."""


@dataclass(frozen=True, slots=True)
class CompletedSample:
    """A finished sample and its text, which a worker thread may still be decoding."""

    sample: FinishedSample
    text: asyncio.Future[str | None]


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """A group, or with `quota_unit: sample` some samples of one, as a reply or an event contains it."""

    prompt: Prompt
    incarnation: int
    done: tuple[CompletedSample, ...]
    complete: bool
    accepted: bool | None = None

    @property
    def keys(self) -> set[tuple[str, int, int]]:
        """(prompt id, incarnation, index) of its samples: unique within the run."""
        return {(self.prompt.id, self.incarnation, done.sample.index) for done in self.done}

    def without(self, keys: set[tuple[str, int, int]]) -> "GroupSlice":
        """The same without the samples named by `keys`."""
        rest = tuple(d for d in self.done if (self.prompt.id, self.incarnation, d.sample.index) not in keys)
        return replace(self, done=rest)


async def wait_for_texts(parts: Iterable[GroupSlice]) -> None:
    """Wait until all texts are decoded. A cancelled waiter leaves them running (`gather` would cancel them)."""
    if texts := [done.text for part in parts for done in part.done]:
        await asyncio.wait(texts)


@dataclass(slots=True)
class CompletedGroup:
    """A prompt and its finished, undelivered samples by index."""

    prompt: Prompt
    done: dict[int, CompletedSample] = field(default_factory=dict)

    def part(self, complete: bool, indices: Iterable[int] | None = None) -> GroupSlice:
        """The named samples (all if `indices` is None) in the order of their indices."""
        chosen = sorted(self.done if indices is None else indices)
        incarnation = self.done[chosen[0]].sample.incarnation if chosen else 0
        return GroupSlice(self.prompt, incarnation, tuple(self.done[i] for i in chosen), complete)


Decode = Callable[[Prompt, FinishedSample], "asyncio.Future[str | None]"]


class CompletedGroups:
    """Undelivered groups by (run, prompt id), which is unique at any time (`unique-prompt-id`)."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._groups: dict[tuple[str, str], CompletedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def samples(self) -> int:
        """Number of stored samples."""
        return sum(len(group.done) for group in self._groups.values())

    def add_prompts(self, run: str, prompts: Iterable[Prompt]) -> None:
        """Add prompts that the scheduler has accepted: their samples may arrive from now on."""
        for prompt in prompts:
            self._groups[run, prompt.id] = CompletedGroup(prompt)

    def prompt_of(self, sample: FinishedSample) -> Prompt | None:
        """The prompt of an undelivered sample; None if its group has been dropped."""
        group = self._groups.get((sample.run, sample.id))
        return group.prompt if group is not None else None

    def add(self, sample: FinishedSample) -> CompletedGroup | None:
        """Store a finished sample and start decoding it; returns its group, or None if that has been dropped."""
        group = self._groups.get((sample.run, sample.id))
        if group is not None:
            group.done[sample.index] = self.completed(group.prompt, sample)
        return group

    def completed(self, prompt: Prompt, sample: FinishedSample) -> CompletedSample:
        """The sample with its text, whose decoding starts now."""
        return CompletedSample(sample, self._decode(prompt, sample))

    def whole(self, run: str, ids: Iterable[str]) -> list[GroupSlice]:
        """Groups that the scheduler reports as whole, with all of their samples."""
        return [self._groups[run, prompt_id].part(complete=True) for prompt_id in ids]

    def take(self, run: str, deliveries: list[Delivery]) -> list[GroupSlice]:
        """Remove and return what a reply contains, in its order.

        Raises:
            MissingSampleError: a sample is missing; then nothing is removed.
        """
        for delivery in deliveries:
            group = self._groups.get((run, delivery.id))
            absent = set(delivery.indices) - set(group.done if group else ())
            if absent:
                raise MissingSampleError(
                    f"samples {sorted(absent)} of prompt {delivery.id!r} of run {run!r} never arrived"
                )
        return [self._take(run, delivery) for delivery in deliveries]

    def _take(self, run: str, delivery: Delivery) -> GroupSlice:
        group = self._groups[run, delivery.id]
        done = tuple(group.done.pop(index) for index in delivery.indices)
        if delivery.complete:
            del self._groups[run, delivery.id]
        return GroupSlice(group.prompt, delivery.incarnation, done, delivery.complete, delivery.accepted)

    def remove(self, run: str, ids: Iterable[str]) -> None:
        """Remove groups that the scheduler has dropped."""
        for prompt_id in ids:
            self._groups.pop((run, prompt_id), None)


def visible_text(engine_decode: Callable[..., str | None], prompt: Prompt, sample: FinishedSample) -> str | None:
    """The text of a sample as SGLang returns it: up to a matched stop token or stop string, with it if `no_stop_trim`.

    The drawn ids are decoded; text is never tokenised again.
    """
    ids = list(memoryview(sample.output_ids).cast("i"))
    matched = sample.finish_reason.get("matched")
    if isinstance(matched, int) and not prompt.no_stop_trim and ids and ids[-1] == matched:
        ids.pop()
    text = engine_decode(ids, prompt.skip_special_tokens, prompt.spaces_between_special_tokens) if ids else ""
    if isinstance(matched, str) and text and matched in text:
        text = text[: text.index(matched) + (len(matched) if prompt.no_stop_trim else 0)]
    return text
