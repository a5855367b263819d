"""Steps 3 to 6: finished samples, from the step in which they end until a reply contains them.

The scheduler hands a sample over once, when it ends (`messages.Finished`); the round that delivers it may be a later
one. So the vault holds what the scheduler no longer has, and all that a reply says of a prompt.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from sglang_april.api import messages


class MissingSampleError(LookupError):
    """The scheduler names a sample that never arrived: a fault of ours, never of a caller."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """What is kept of a prompt from its acceptance until its group is wholly delivered or dropped."""

    run: str
    id: str
    n: int
    prompt_ids: bytes
    """int32 [prompt_len]."""
    metadata: bytes
    """msgpack; empty when the caller gave none."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    truncates: bool = False
    """Whether top-k, top-p or min-p truncate the sampling distribution, which `logprobs` then do not describe."""

    @classmethod
    def of(cls, run: str, prompt: messages.Prompt) -> "PromptRecord":
        """What the scheduler was told of a prompt, as far as a reply needs it."""
        return cls(
            run,
            prompt.id,
            prompt.n,
            prompt.input_ids,
            prompt.metadata,
            prompt.skip_special_tokens,
            prompt.spaces_between_special_tokens,
            prompt.no_stop_trim,
            prompt.truncates,
        )


@dataclass(frozen=True, slots=True)
class CompletedSample:
    """A finished sample and its text, which a worker thread may still be decoding."""

    sample: messages.FinishedSample
    text: asyncio.Future[str | None]


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """A group, or for `unit: sample` some samples of one, as a reply or an event contains it."""

    prompt: PromptRecord
    incarnation: int
    done: tuple[CompletedSample, ...]
    complete: bool
    accepted: bool | None = None

    @property
    def keys(self) -> set[tuple[str, int, int]]:
        """What tells its samples from all others of its run."""
        return {(self.prompt.id, self.incarnation, done.sample.index) for done in self.done}

    def without(self, keys: set[tuple[str, int, int]]) -> "GroupSlice":
        """The same without the samples named by `keys`."""
        rest = tuple(d for d in self.done if (self.prompt.id, self.incarnation, d.sample.index) not in keys)
        return replace(self, done=rest)


async def decoded(parts: Iterable[GroupSlice]) -> None:
    """Wait for all texts. A reader that is cancelled leaves them to the others; `gather` would cancel them for all."""
    if texts := [done.text for part in parts for done in part.done]:
        await asyncio.wait(texts)


@dataclass(slots=True)
class CompletedGroup:
    """A prompt and those of its samples that have finished and are in no reply yet."""

    prompt: PromptRecord
    done: dict[int, CompletedSample] = field(default_factory=dict)
    whole: bool = False
    """Every undelivered sample has finished, so that all of them wait here."""
    judged: bool = False
    """The caller has accepted or rejected it."""

    def part(self, complete: bool, indices: Iterable[int] | None = None) -> GroupSlice:
        """The named samples (all that wait here, if none are named) in the order of their indices."""
        chosen = sorted(self.done if indices is None else indices)
        incarnation = self.done[chosen[0]].sample.incarnation if chosen else 0
        return GroupSlice(self.prompt, incarnation, tuple(self.done[i] for i in chosen), complete)


Decode = Callable[[PromptRecord, messages.FinishedSample], "asyncio.Future[str | None]"]


class CompletedGroups:
    """Undelivered groups by run and id. An id is in use by one incarnation at a time, so that is key enough."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._groups: dict[tuple[str, str], CompletedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def samples(self) -> int:
        """Finished samples that wait for delivery."""
        return sum(len(group.done) for group in self._groups.values())

    def accept(self, prompts: Iterable[PromptRecord]) -> None:
        """Prompts that the scheduler has just accepted: from now on their samples may arrive."""
        for prompt in prompts:
            self._groups[prompt.run, prompt.id] = CompletedGroup(prompt)

    def put(self, sample: messages.FinishedSample) -> CompletedGroup | None:
        """Keep a sample that has ended and start decoding it; None if its group has been dropped meanwhile."""
        group = self._groups.get((sample.run, sample.id))
        if group is not None:
            group.whole = sample.whole
            group.done[sample.index] = CompletedSample(sample, self._decode(group.prompt, sample))
        return group

    def unjudged(self, run: str) -> list[GroupSlice]:
        """Whole groups of a run without a verdict, as previews; those that arrived first in front."""
        return [g.part(True) for (name, _), g in self._groups.items() if name == run and g.whole and not g.judged]

    def judge(self, run: str, ids: Iterable[str]) -> None:
        """These groups have their verdict, which the scheduler knows."""
        for prompt_id in ids:
            if group := self._groups.get((run, prompt_id)):
                group.judged = True

    def deliver(self, run: str, deliveries: list[messages.Delivery]) -> list[GroupSlice]:
        """Take what a round's reply contains, in its order. If anything is missing, nothing is taken."""
        for delivery in deliveries:
            group = self._groups.get((run, delivery.id))
            absent = set(delivery.indices) - set(group.done if group else ())
            if absent:
                raise MissingSampleError(
                    f"samples {sorted(absent)} of prompt {delivery.id!r} of run {run!r} never arrived"
                )
        return [self._take(run, delivery) for delivery in deliveries]

    def _take(self, run: str, delivery: messages.Delivery) -> GroupSlice:
        group = self._groups[run, delivery.id]
        done = tuple(group.done.pop(index) for index in delivery.indices)
        if delivery.complete:
            del self._groups[run, delivery.id]
        return GroupSlice(group.prompt, delivery.incarnation, done, delivery.complete, delivery.accepted)

    def drop(self, run: str, ids: list[str] | None) -> None:
        """Forget groups of a run (all when `ids` is None)."""
        for key in [key for key in self._groups if key[0] == run and (ids is None or key[1] in ids)]:
            del self._groups[key]


def visible_text(
    engine_decode: Callable[..., str | None], prompt: PromptRecord, sample: messages.FinishedSample
) -> str | None:
    """The text of a sample as SGLang would show it: a matched stop token or stop string is cut off unless asked for.

    The ids are those that were drawn; nothing is ever tokenised again.
    """
    ids = list(memoryview(sample.output_ids).cast("i"))
    matched = None if prompt.no_stop_trim else sample.finish_reason.get("matched")
    if isinstance(matched, int) and ids and ids[-1] == matched:
        ids.pop()
    text = engine_decode(ids, prompt.skip_special_tokens, prompt.spaces_between_special_tokens) if ids else ""
    if isinstance(matched, str) and text and matched in text:
        text = text[: text.index(matched)]
    return text
