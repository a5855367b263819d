"""Reward, filter and hook functions as users of slime write them."""

from typing import Any


async def reward(_args: Any, sample: Any, **_: Any) -> float:
    return float(sample.response_length % 3)


async def group_reward(_args: Any, samples: list[Any], **_: Any) -> list[float]:
    return [float(i) for i, _ in enumerate(samples)]


def drop_odd_groups(_args: Any, samples: list[Any], **_: Any) -> bool:
    return samples[0].group_index % 2 == 0
