"""A distributed push in which one engine refuses a bucket: the others are unblocked, and the next push succeeds."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.bridge.receivers import Receiver
from trainer_bridge.push.distributed import DistributedTransport
from trainer_bridge.push.push_target import WeightCallError
from trainer_bridge.push.transport import WeightBucket

# An engine that stays blocked would be waited for five minutes.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Receiver]]:
    """Three, so that gloo's tree is one deep: the third gets its data from the first."""
    receivers = [Receiver(name) for name in ("first", "second", "third")]
    yield receivers
    for receiver in receivers:
        receiver.close()


def test_engines_waiting_in_the_broadcast_are_unblocked_when_one_refuses(receivers: list[Receiver]) -> None:
    engines: Any = receivers
    transport = DistributedTransport(engines, torch.device("cpu"))
    bucket = WeightBucket.of([("w", torch.ones(100_000))])
    transport.open()
    transport.send(bucket)
    receivers[0].refuse(True)
    with pytest.raises(WeightCallError, match="first refuses"):
        transport.send(bucket)
    receivers[0].refuse(False)  # every receiver answers again, so none of them is still blocked
    for receiver in receivers[1:]:
        receiver.refuse(False)
    transport.open()
    transport.send(bucket)
    transport.close()


def test_engine_that_refuses_to_join_fails_the_push_at_once(receivers: list[Receiver]) -> None:
    engines: Any = receivers[:1]
    receivers[0].refuse(True)
    before = set(threading.enumerate())
    transport = DistributedTransport(engines, torch.device("cpu"))
    with pytest.raises(WeightCallError, match="first refuses"):
        transport.open()
    transport.close()
    deadline = time.monotonic() + 60
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"the trainer still waits for the engine: {left}"
        time.sleep(0.05)
