"""A push whose first broadcast blocks while the communicator is set up, as NCCL's does until all engines take part."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer_bridge.push import distributed
from trainer_bridge.push.distributed import DistributedTransport
from trainer_bridge.push.push_target import WeightCallError
from trainer_bridge.push.transport import WeightBucket

pytestmark = pytest.mark.timeout(60)


class RefusingTarget:
    """Refuses each bucket; never takes part in a broadcast."""

    url, info = "http://127.0.0.1:1", SimpleNamespace(tp_size=1)

    def __init__(self) -> None:
        self.paths: list[str] = []

    def weight_call(self, path: str, _body: dict[str, Any]) -> None:
        self.paths.append(path)
        if path == "/update_weights_from_distributed":
            raise WeightCallError("refused")


class BlockedTarget:
    """Waits in the communicator's set-up for an engine that refused, and answers no call before `released`."""

    url, info = "http://127.0.0.1:2", SimpleNamespace(tp_size=1)

    def __init__(self, released: threading.Event) -> None:
        self.released = released

    def weight_call(self, _path: str, _body: dict[str, Any]) -> None:
        self.released.wait()


class FakeProcessGroup:
    """A process group of this backend that records how it ends."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.calls: list[str] = []
        self.ended = threading.Event()

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A broadcast that does not return before this event is set; groups are destroyed by name only."""
    released = threading.Event()

    def destroy(group: FakeProcessGroup) -> None:
        group.calls.append("destroy")
        group.ended.set()

    monkeypatch.setattr(dist, "broadcast", lambda *_args, **_kwargs: released.wait(30))
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    return released


@pytest.mark.parametrize(("backend", "ends"), [("nccl", ["abort", "destroy"]), ("gloo", ["destroy"])])
def test_refusal_is_noticed_while_the_first_broadcast_blocks(
    blocked: threading.Event, backend: str, ends: list[str]
) -> None:
    engines: Any = [RefusingTarget()]
    transport = DistributedTransport(engines, torch.device("cpu"), "127.0.0.1")
    transport._group = group = FakeProcessGroup(backend)
    with pytest.raises(WeightCallError, match="refused"):
        transport.send(WeightBucket.of([("w", torch.ones(4))]))
    assert not blocked.is_set(), "the broadcast still blocks"
    assert group.ended.wait(10)
    assert group.calls == ends
    blocked.set()
    transport.close()


def test_engine_blocked_in_the_set_up_does_not_keep_the_push_of_the_others(
    blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound, the push and the end of the trainer would wait for an engine that nothing releases."""
    monkeypatch.setattr(distributed, "RELEASE_S", 0.3)
    refusing = RefusingTarget()
    engines: Any = [BlockedTarget(blocked), refusing]
    transport = DistributedTransport(engines, torch.device("cpu"), "127.0.0.1")
    transport._group, transport.group_name = FakeProcessGroup("nccl"), "april"
    with pytest.raises(WeightCallError, match="refused"):
        transport.send(WeightBucket.of([("w", torch.ones(4))]))
    transport.close()
    assert not blocked.is_set(), "the engine is still blocked"
    leave = "/destroy_weights_update_group"
    assert refusing.paths == ["/update_weights_from_distributed", leave, leave], "it leaves after its refusal, at once"
    blocked.set()
