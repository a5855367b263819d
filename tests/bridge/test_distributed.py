"""A distributed push in which one engine refuses a bucket: the others are let go, and the next push reaches all."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.bridge.receivers import Receiver
from trainer_bridge.push.bucket import WeightBucket
from trainer_bridge.push.distributed import DistributedTransport
from trainer_bridge.push.push_target import WeightCallError

# What is not let go is waited for five minutes.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Receiver]]:
    """Three, so that gloo's tree is one deep: the third gets its data from the first."""
    made = [Receiver(name) for name in ("first", "second", "third")]
    yield made
    for receiver in made:
        receiver.close()


def test_whoever_waits_for_an_engine_that_refuses_is_let_go(receivers: list[Receiver]) -> None:
    engines: Any = receivers
    way = DistributedTransport(engines, torch.device("cpu"))
    bucket = WeightBucket.of([("w", torch.ones(100_000))])
    way.open()
    way.send(bucket)
    receivers[0].refuse(True)
    with pytest.raises(WeightCallError, match="first refuses"):
        way.send(bucket)
    receivers[0].refuse(False)  # every receiver answers again, so none of them waits any longer
    for receiver in receivers[1:]:
        receiver.refuse(False)
    way.open()
    way.send(bucket)
    way.close()


def test_an_engine_that_refuses_to_join_is_heard_at_once(receivers: list[Receiver]) -> None:
    engines: Any = receivers[:1]
    receivers[0].refuse(True)
    with pytest.raises(WeightCallError, match="first refuses"):
        DistributedTransport(engines, torch.device("cpu")).open()
