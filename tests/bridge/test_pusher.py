"""The state machine of a push to several engines, with a failure at every point; buckets; what they carry."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sglang_april.client import AprilError
from trainer_bridge.hf_folder import batches
from trainer_bridge.push.bucket import WeightBucket
from trainer_bridge.push.pusher import Pusher, PushFailed, PushState
from trainer_bridge.push.tensor import serialise

BATCHES = [[(f"tensor {i}", torch.full((2, 3), float(i)))] for i in range(3)]


@dataclass
class World:
    """Two engines and a way that write down what is asked of them, and fail where they are told to."""

    fails: str = ""
    said: list[str] = field(default_factory=list)

    def say(self, what: str) -> None:
        self.said.append(what)
        if what == self.fails:
            raise AprilError(503, "push", f"{what} does not work")


class FakeApril:
    """The push routes of an engine, as `AprilClient` has them."""

    def __init__(self, name: str, version: int, world: World) -> None:
        self.name, self.version, self.world = name, version, world

    def state(self) -> dict[str, Any]:
        return {"policy_version": self.version}

    def push_begin(self, version: int) -> None:
        assert version > self.version
        self.world.say(f"begin {self.name}")

    def push_end(self, version: int) -> None:
        self.world.say(f"end {self.name}")
        self.version = version

    def close(self) -> None:
        pass


class FakeEngine:
    def __init__(self, name: str, version: int, world: World) -> None:
        self.april = FakeApril(name, version, world)

    def close(self) -> None:
        pass


class FakeWay:
    def __init__(self, world: World) -> None:
        self.world, self.sent = world, 0

    def open(self) -> None:
        self.sent = 0
        self.world.say("open")

    def send(self, bucket: WeightBucket) -> None:
        self.world.say(f"send {self.sent}")
        self.sent += 1

    def finish(self) -> None:
        self.world.say("finish")

    def broke(self) -> None:
        self.world.said.append("broke")

    def close(self) -> None:
        pass


def make(world: World, versions: tuple[int, int] = (4, 7)) -> tuple[Pusher, list[Any]]:
    engines: list[Any] = [FakeEngine(name, v, world) for name, v in zip("ab", versions, strict=True)]
    return Pusher(engines, FakeWay(world)), engines


def test_a_push_begins_everywhere_sends_everything_and_ends_everywhere() -> None:
    world = World()
    pusher, engines = make(world)
    report = pusher.push(BATCHES)
    assert sorted(world.said[:2]) == ["begin a", "begin b"]
    assert world.said[2:-2] == ["open", "send 0", "send 1", "send 2", "finish"]
    assert sorted(world.said[-2:]) == ["end a", "end b"]
    assert (report.version, report.calls, report.bytes) == (8, 3, 3 * 24)
    assert [engine.april.version for engine in engines] == [8, 8]
    assert pusher.state is PushState.IDLE


@pytest.mark.parametrize("fails", ["begin a", "begin b", "open", "send 1", "finish", "end a", "end b"])
def test_a_failure_anywhere_stops_the_push_and_the_next_one_heals(fails: str) -> None:
    """Nothing is sent or ended after it; all batches are taken, for other ranks make them too."""
    world = World(fails)
    pusher, engines = make(world)
    taken = []
    with pytest.raises(PushFailed, match=f"{fails} does not work"):
        pusher.push(taken.append(i) or batch for i, batch in enumerate(BATCHES))
    assert taken == [0, 1, 2]
    assert pusher.state is PushState.FAILED
    assert world.said[-1] == "broke"
    assert world.said.index("broke") - world.said.index(fails) <= 2  # its twin on the other engine was on the way
    if not fails.startswith("end"):
        assert not [word for word in world.said if word.startswith("end")]
    world.fails, world.said = "", []
    ahead = max(engine.april.version for engine in engines)
    assert pusher.push(BATCHES).version == ahead + 1
    assert [engine.april.version for engine in engines] == [ahead + 1] * 2
    assert pusher.state is PushState.IDLE
    assert "broke" not in world.said


def test_a_version_may_be_named() -> None:
    pusher, engines = make(World())
    assert pusher.push(BATCHES, version=20).version == 20
    assert [engine.april.version for engine in engines] == [20, 20]


def test_a_bucket_holds_tensors_of_several_types_without_gaps() -> None:
    tensors = [
        ("a", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)),
        ("b", torch.tensor(3.5)),
        ("c", torch.arange(8.0).reshape(2, 4).t()),
    ]
    bucket = WeightBucket.of(tensors)
    assert bucket.flat.numel() == 12 + 4 + 32
    assert (bucket.dtypes, bucket.shapes) == (["bfloat16", "float32", "float32"], [[2, 3], [], [4, 2]])
    assert bucket.flat.tolist() == [
        byte for _, x in tensors for byte in x.contiguous().reshape(-1).view(torch.uint8).tolist()
    ]


def test_views_of_aligned_tensors_are_the_tensors() -> None:
    tensors = [("a", torch.randn(3, 4)), ("b", torch.randn(5)), ("c", torch.randn(2, 2).bfloat16())]
    for (name, view), (expected, tensor) in zip(WeightBucket.of(tensors).views(), tensors, strict=True):
        assert name == expected
        assert torch.equal(view, tensor)


def test_batches_keep_order_and_bound() -> None:
    tensors = [(str(i), torch.zeros(n)) for i, n in enumerate([10, 10, 100, 5, 5, 10])]
    made = list(batches(tensors, 80))
    assert [[name for name, _ in batch] for batch in made] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert [x for batch in made for x in batch] == tensors


def test_tensors_in_a_call_carry_their_own_bytes_only() -> None:
    """A view would be pickled with the whole bucket beneath it."""
    large = torch.zeros(1_000_000)
    assert len(serialise([("x", large[:10])])) < 5_000
