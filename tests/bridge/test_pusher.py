"""The state machine of a push to several engines, with a failure at every point; weight buckets."""

import contextlib
import multiprocessing
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from examples import tiny_model
from sglang_april.client import AprilError
from tests.support.live import until
from trainer_bridge import cli, hf_folder
from trainer_bridge.config import Config
from trainer_bridge.handshake import EngineInfo, HandshakeError
from trainer_bridge.hf_folder import batches
from trainer_bridge.megatron.workers import ProcessWorkers
from trainer_bridge.push import pusher as pushing
from trainer_bridge.push.disk import DiskTransport
from trainer_bridge.push.distributed import DistributedTransport
from trainer_bridge.push.push_target import WeightCallError
from trainer_bridge.push.pusher import PUSH_ERRORS, Pusher, PushFailed, PushState, connect
from trainer_bridge.push.tensor import TensorTransport, serialize
from trainer_bridge.push.transport import WeightBucket

BATCHES = [[(f"tensor {i}", torch.full((2, 3), float(i)))] for i in range(3)]


@dataclass
class CallLog:
    """Records the calls to two engines and a transport, and makes one of them fail."""

    fails: str = ""
    calls: list[str] = field(default_factory=list)

    def record(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            raise AprilError(503, "push", f"{call} does not work")


class FakeApril:
    """The push routes of an engine, as `AprilClient` has them."""

    def __init__(self, name: str, version: int, log: CallLog) -> None:
        self.name, self.version, self.log = name, version, log

    def state(self) -> dict[str, Any]:
        return {"policy_version": self.version}

    def push_begin(self, version: int) -> None:
        assert version > self.version
        self.log.record(f"begin {self.name}")

    def push_end(self, version: int) -> None:
        self.log.record(f"end {self.name}")
        self.version = version

    def close(self) -> None:
        pass


class FakePushTarget:
    def __init__(self, name: str, version: int, log: CallLog) -> None:
        self.april = FakeApril(name, version, log)

    def close(self) -> None:
        pass


class FakeTransport:
    def __init__(self, log: CallLog) -> None:
        self.log, self.sent = log, 0

    def open(self) -> None:
        self.sent = 0
        self.log.record("open")

    def send(self, bucket: WeightBucket) -> None:
        self.log.record(f"send {self.sent}")
        self.sent += 1

    def finish(self) -> None:
        self.log.record("finish")

    def abort(self) -> None:
        self.log.calls.append("abort")

    def close(self) -> None:
        pass


def make(log: CallLog, versions: tuple[int, int] = (4, 7)) -> tuple[Pusher, list[Any]]:
    engines: list[Any] = [FakePushTarget(name, v, log) for name, v in zip("ab", versions, strict=True)]
    return Pusher(engines, FakeTransport(log)), engines


def test_push_begins_on_all_engines_sends_all_buckets_and_ends_on_all() -> None:
    log = CallLog()
    pusher, engines = make(log)
    report = pusher.push(BATCHES)
    assert sorted(log.calls[:2]) == ["begin a", "begin b"]
    assert log.calls[2:-2] == ["open", "send 0", "send 1", "send 2", "finish"]
    assert sorted(log.calls[-2:]) == ["end a", "end b"]
    assert (report.version, report.calls, report.bytes) == (8, 3, 3 * 24)
    assert [engine.april.version for engine in engines] == [8, 8]
    assert pusher.state is PushState.IDLE


@pytest.mark.parametrize("fails", ["begin a", "begin b", "open", "send 1", "finish", "end a", "end b"])
def test_failure_at_any_point_stops_the_push_and_the_next_one_recovers(fails: str) -> None:
    """Nothing is sent or ended after the failure. All batches are consumed, because other ranks produce them too."""
    log = CallLog(fails)
    pusher, engines = make(log)
    consumed = []
    with pytest.raises(PushFailed, match=f"{fails} does not work"):
        pusher.push(consumed.append(i) or batch for i, batch in enumerate(BATCHES))
    assert consumed == [0, 1, 2]
    assert pusher.state is PushState.FAILED
    assert log.calls[-1] == "abort"
    assert log.calls.index("abort") - log.calls.index(fails) <= 2  # the other engine was called too
    if not fails.startswith("end"):
        assert not [call for call in log.calls if call.startswith("end")]
    log.fails, log.calls = "", []
    highest = max(engine.april.version for engine in engines)
    assert pusher.push(BATCHES).version == highest + 1
    assert [engine.april.version for engine in engines] == [highest + 1] * 2
    assert pusher.state is PushState.IDLE
    assert "abort" not in log.calls


def test_push_takes_an_explicit_version() -> None:
    pusher, engines = make(CallLog())
    assert pusher.push(BATCHES, version=20).version == 20
    assert [engine.april.version for engine in engines] == [20, 20]


def test_bucket_contains_tensors_of_several_dtypes_without_gaps() -> None:
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


def test_bucket_views_equal_the_tensors() -> None:
    tensors = [("a", torch.randn(3, 4)), ("b", torch.randn(5)), ("c", torch.randn(2, 2).bfloat16())]
    for (name, view), (expected, tensor) in zip(WeightBucket.of(tensors).views(), tensors, strict=True):
        assert name == expected
        assert torch.equal(view, tensor)


def test_batches_keep_order_and_size_limit() -> None:
    tensors = [(str(i), torch.zeros(n)) for i, n in enumerate([10, 10, 100, 5, 5, 10])]
    split = list(batches(tensors, 80))
    assert [[name for name, _ in batch] for batch in split] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert [x for batch in split for x in batch] == tensors


def test_serialized_view_excludes_the_rest_of_its_storage() -> None:
    large = torch.zeros(1_000_000)
    assert len(serialize([("x", large[:10])])) < 5_000


@pytest.fixture
def engines_on(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """The GPUs that engines report, by URL; the trainer has GPU `t0`."""
    gpus: dict[str, tuple[str, ...]] = {}
    monkeypatch.setattr(pushing, "shake_hands", lambda url, *_: EngineInfo(url, len(gpus[url]), 1, "0", gpus[url]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="t0"))
    return gpus


@pytest.mark.parametrize(
    ("gpus", "transport", "shared"),
    [
        ({"http://127.0.0.1:1": ("e0", "e1"), "http://127.0.0.1:2": ("e2", "e3")}, DistributedTransport, ""),
        ({"http://127.0.0.1:1": ("e0", "t0")}, TensorTransport, ":1 shares GPU t0 with the trainer"),
        (
            {"http://127.0.0.1:1": ("e0",), "http://127.0.0.1:2": ("e0",)},
            TensorTransport,
            ":2 shares GPU e0 with the engine at h",
        ),
    ],
)
def test_nccl_gets_one_rank_for_each_gpu(
    gpus: dict[str, Any], transport: type, shared: str, engines_on: dict[str, Any], tmp_path: Path
) -> None:
    """Servers that the run did not start may be anywhere: `auto` goes by the UUIDs, and `distributed` is refused."""
    engines_on.update(gpus)
    source, device = tiny_model.make(tmp_path / "model"), torch.device("cuda", 0)
    made = connect([*gpus], "auto", source=source, device=device)
    assert isinstance(made.transport, transport)
    made.close()
    if shared:
        with pytest.raises(HandshakeError, match=f"push: distributed is not possible: .*{shared}"):
            connect([*gpus], "distributed", source=source, device=device)
    on_cpu = connect([*gpus][:1], "auto", source=source, device=torch.device("cpu"))
    assert isinstance(on_cpu.transport, DistributedTransport)
    on_cpu.close()


def test_a_full_disk_fails_the_push_and_not_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors' own error is no OSError, and nothing would repeat the push."""

    def fails(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(hf_folder, "save_file", fails)
    transport = DiskTransport([], tiny_model.make(tmp_path / "model"))
    transport.open()
    transport.send(WeightBucket.of(BATCHES[0]))
    with pytest.raises(PUSH_ERRORS, match="No space left"):
        transport.finish()
    transport.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_push_through_a_folder_leaves_nothing_on_the_disk(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may be killed between pushes: the weights of a whole model would stay in the temporary folder."""
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    found: list[list[str]] = []

    def load(_: str, body: dict[str, Any]) -> None:
        found.append(sorted(path.name for path in Path(body["model_path"]).glob("*.safetensors")))
        if fails:
            raise WeightCallError("refused")

    engines: list[Any] = [SimpleNamespace(weight_call=load)] * 2
    transport = DiskTransport(engines, tiny_model.make(tmp_path / "model"))
    transport.open()
    transport.send(WeightBucket.of(BATCHES[0]))
    with pytest.raises(WeightCallError) if fails else contextlib.nullcontext():
        transport.finish()
    assert found == [["model.safetensors"]] * 2
    assert not list(temporary.iterdir())
    transport.close()


def push_for_ever(temporary: Path, model: Path, began: Path) -> None:
    """In a process of its own."""
    tempfile.tempdir = str(temporary)

    def load(*_: Any) -> None:
        began.touch()
        time.sleep(600)

    engines: list[Any] = [SimpleNamespace(weight_call=load)]
    transport = DiskTransport(engines, model)
    transport.send(WeightBucket.of(BATCHES[0]))
    transport.finish()


@pytest.mark.parametrize("cause", ["Ctrl-C", "another rank has died"])
def test_a_rank_that_is_killed_in_a_push_through_a_folder_leaves_nothing_on_the_disk(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (other := temporary / "april-push-elsewhere-1-x").mkdir()
    began, model = tmp_path / "began", tiny_model.make(tmp_path / "model")
    context = multiprocessing.get_context("spawn")
    rank = context.Process(target=push_for_ever, args=(temporary, model, began), daemon=True)

    def run(*_: Any) -> int:
        rank.start()
        until(began.exists, "the push")
        raise cli.Interrupted(signal.SIGINT)

    if cause == "Ctrl-C":
        monkeypatch.setattr(cli, "_run", run)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(multiprocessing, "active_children", lambda: [rank])
        assert cli._train(Config(hf_checkpoint="m", prompt_data="d", save=str(tmp_path / "run"))) == 130
    else:
        with pytest.raises(cli.Interrupted):
            run()
        workers: Any = SimpleNamespace(processes=[rank])
        ProcessWorkers._kill(workers)
    assert not rank.is_alive()
    assert list(temporary.iterdir()) == [other]
