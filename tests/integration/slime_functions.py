"""Reward, filter and hook functions as users of slime write them."""

from typing import Any


async def reward(_args: Any, sample: Any, **_: Any) -> float:
    return float(sample.response_length % 3)


async def group_reward(_args: Any, samples: list[Any], **_: Any) -> list[float]:
    return [float(i) for i, _ in enumerate(samples)]


def drop_odd_groups(_args: Any, samples: list[Any], **_: Any) -> bool:
    return samples[0].group_index % 2 == 0


def sample_hook(_args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """Writes metadata that `hooked_reward` reads, and gives samples with an odd index their reward."""
    sample.metadata["hook"] = [rollout_id, evaluation]
    if sample.index % 2:
        sample.reward = -1.0


async def second_hook(_args: Any, sample: Any) -> Any:
    sample.metadata["hook"].append("second")
    return sample


async def hooked_reward(_args: Any, sample: Any, **_: Any) -> float:
    return float(sample.metadata["hook"][0])


def filter_samples(args: Any, groups: list[list[Any]]) -> None:
    """Takes the first sample of each group out of the loss, and keeps what it was called with."""
    args.filter_got = [list(group) for group in groups]
    for group in groups:
        group[0].remove_sample = True


def process_all_samples(args: Any, groups: list[list[Any]], data_source: Any) -> None:
    """Keeps what it was called with."""
    args.process_got = [list(group) for group in groups], data_source
