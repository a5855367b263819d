"""`--april-cpu-pace`: tables, the clock, and forwards that queue on it."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bench.pace
from bench.pace import GPUS, MODELS, decode_ms, modelled, prefill_ms
from bench.pace_tables import TABLES
from bench.rollout.limit import Decoded, DecodeRate, NeverFullError
from sglang_april import config
from sglang_april.cpu import pace
from sglang_april.cpu.platform import check_pace

NAMES = {(model, gpu): TABLES / f"{model}-{gpu}.json" for model in MODELS for gpu in GPUS}


class Mode:
    """Replaces SGLang's `ForwardMode`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "idle"

    def is_decode(self) -> bool:
        return self.name == "decode"


def batch_of(mode: str, **fields: Any) -> Any:
    return SimpleNamespace(forward_mode=Mode(mode), **fields)


def table(tmp_path: Path, decode: float = 1.0, prefill: float = 2.0) -> pace.Table:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(values(decode, prefill)))
    return pace.load(str(path))


def values(decode: float = 1.0, prefill: float = 2.0) -> dict[str, Any]:
    return {
        "name": "test",
        "decode_ms": {"rows": [1, 10], "context": [0, 100], "ms": [[decode, 3 * decode], [2 * decode, 4 * decode]]},
        "prefill_ms": {"tokens": [1, 100], "attended": [0, 100], "ms": [[prefill, prefill], [prefill, 3 * prefill]]},
    }


def test_grid_is_exact_at_its_points_and_linear_between_and_beyond(tmp_path: Path) -> None:
    grid = table(tmp_path).decode
    assert [grid.at(*point) for point in ((1, 0), (1, 100), (10, 0), (10, 100))] == [1, 3, 2, 4]
    assert grid.at(5.5, 50) == pytest.approx(2.5)
    assert grid.at(19, 0) == pytest.approx(3)
    assert grid.at(1, 200) == pytest.approx(5)
    assert grid.at(0, -5) == 1


def test_seconds_of_a_batch(tmp_path: Path) -> None:
    times = table(tmp_path)
    assert times.seconds(batch_of("idle", batch_size=0)) == 0
    assert times.seconds(batch_of("decode", batch_size=10, seq_lens_cpu=torch.tensor([50] * 10))) == pytest.approx(3e-3)
    # 60 tokens attend to 30 on average, 40 behind 100 to 120: 66
    mixed = batch_of("extend", batch_size=2, extend_seq_lens_cpu=[60, 40], extend_prefix_lens_cpu=[0, 100])
    assert times.seconds(mixed) == pytest.approx(2e-3 * (1 + 2 * 0.66))


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {**values(), "decode_ms": {"rows": [1], "context": [0, 1], "ms": [[1, 1]]}},
        {**values(), "decode_ms": {"rows": [2, 1], "context": [0, 1], "ms": [[1, 1], [1, 1]]}},
        {**values(), "decode_ms": {"rows": [1, 2], "context": [0, 1], "ms": [[1, 1]]}},
        values(decode=0),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(config.ConfigError, match=r"broken\.json is not a table of times"):
        pace.load(str(path))


def test_start_ends_with_a_sentence_for_a_wrong_table_or_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pace.ENV, str(tmp_path / "missing.json"))
    with pytest.raises(SystemExit, match="is not a table of times"):
        check_pace("torch_native")
    monkeypatch.setenv(pace.ENV, str(NAMES["qwen3-4b", "h100"]))
    check_pace("torch_native")
    with pytest.raises(SystemExit, match="needs --attention-backend torch_native"):
        check_pace("intel_amx")


def test_flag_overrides_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.ENV, raising=False)
    monkeypatch.setenv(pace.ENV, str(NAMES["qwen3-4b", "h100"]))
    table(tmp_path)
    monkeypatch.setenv(config.ENV, json.dumps({"cpu_pace": str(tmp_path / "table.json")}))
    chosen = pace.chosen()
    assert chosen is not None
    assert chosen.name == "test"


class FakeModelRunner:
    """Replaces SGLang's `ModelRunner`."""

    def __init__(self, *, overlap: bool) -> None:
        self.server_args = SimpleNamespace(disable_overlap_schedule=not overlap)

    def forward(self, _: Any) -> str:
        return "result"


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what `install` replaces in torch."""
    monkeypatch.setattr(torch.cpu, "Event", torch.cpu.Event)
    monkeypatch.setattr(torch.cpu, "synchronize", torch.cpu.synchronize)


DECODE = batch_of("decode", batch_size=1, seq_lens_cpu=torch.tensor([0]))


@pytest.mark.usefixtures("patched")
def test_launches_return_at_once_and_their_events_follow_one_another(tmp_path: Path) -> None:
    runner: Any = FakeModelRunner(overlap=True)
    pace.install(runner, table(tmp_path, decode=60_000))
    events = []
    for _ in range(3):
        assert runner.forward(DECODE) == "result"
        events.append(torch.cpu.Event())
        assert events[-1].query()  # nothing was recorded yet
        events[-1].record()
    reached = [event.reached_at for event in events]  # type: ignore[attr-defined]
    assert reached[1] - reached[0] == pytest.approx(60)
    assert reached[2] - reached[1] == pytest.approx(60)
    assert not any(event.query() for event in events)


@pytest.mark.usefixtures("patched")
def test_an_event_waits_for_what_was_launched_before_it(tmp_path: Path) -> None:
    runner: Any = FakeModelRunner(overlap=True)
    pace.install(runner, table(tmp_path, decode=30))
    runner.forward(DECODE)
    event = torch.cpu.Event()
    event.record()
    event.synchronize()
    assert time.perf_counter() >= event.reached_at  # type: ignore[attr-defined]
    assert event.query()
    runner.forward(DECODE)
    later = torch.cpu.Event()
    later.record()
    torch.cpu.synchronize()
    assert later.query()


@pytest.mark.usefixtures("patched")
def test_without_overlap_a_forward_waits_for_its_end(tmp_path: Path) -> None:
    runner: Any = FakeModelRunner(overlap=False)
    pace.install(runner, table(tmp_path, decode=20))
    runner.forward(DECODE)
    event = torch.cpu.Event()
    event.record()
    assert event.query()


@pytest.mark.parametrize(("model", "gpu"), NAMES)
def test_shipped_tables_are_those_of_the_model(model: str, gpu: str) -> None:
    written = json.loads(NAMES[model, gpu].read_text())
    assert written == json.loads(json.dumps(modelled(MODELS[model], GPUS[gpu])))
    assert written["kind"] == "modelled"
    assert "modelled" in pace.load(str(NAMES[model, gpu])).name


@pytest.mark.parametrize("name", NAMES.values(), ids=lambda path: path.stem)
def test_a_prompt_attends_to_no_other_prompt_of_its_batch(name: Path) -> None:
    table = pace.load(str(name))

    def seconds(*lengths: int) -> float:
        prefixes = [0] * len(lengths)
        return table.seconds(
            batch_of("extend", batch_size=len(lengths), extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=prefixes)
        )

    many, one, without = seconds(*[256] * 32), seconds(8192), seconds(*[1] * 8192)
    assert many < one
    # each token attends to 128 tokens on average, not to 4,096
    assert many - without == pytest.approx((one - without) / 32, rel=0.01)


def test_a_table_over_prefixes_is_refused(tmp_path: Path) -> None:
    path, old = tmp_path / "old.json", values()
    old["prefill_ms"]["prefix"] = old["prefill_ms"].pop("attended")
    path.write_text(json.dumps(old))
    with pytest.raises(config.ConfigError, match="no axis 'attended'"):
        pace.load(str(path))


def test_modelled_times_grow_with_each_size() -> None:
    for model in MODELS.values():
        for gpu in GPUS.values():
            for ms in (decode_ms, prefill_ms):
                assert ms(model, gpu, 64, 1024) < ms(model, gpu, 2048, 1024)
                assert ms(model, gpu, 64, 1024) < ms(model, gpu, 64, 8192)


def measured_table(monkeypatch: pytest.MonkeyPatch, fits: int) -> dict[str, Any]:
    """A table measured at an engine that holds `fits` tokens, whose step takes a millisecond per 1,000 tokens."""

    async def decode(_engine: Any, batch: int, _length: int, context: int) -> Decoded:
        if batch * context > fits:
            raise NeverFullError
        return Decoded(1.0, (DecodeRate(batch, 0.0, batch * context / 1e6),))

    async def prefill(_engine: Any, tokens: int) -> float:
        return tokens / 1e5

    monkeypatch.setattr(bench.pace, "decode_rate", decode)
    monkeypatch.setattr(bench.pace, "prefill_seconds", prefill)
    return asyncio.run(bench.pace.measured("http://none", (1, 8), (16, 1024, 4096), "here, measured"))


def test_cells_whose_batch_does_not_fit_are_extrapolated_by_context(monkeypatch: pytest.MonkeyPatch) -> None:
    table = measured_table(monkeypatch, fits=10_000)
    assert table["decode_ms"]["ms"] == [pytest.approx([0.016, 1.024, 4.096]), pytest.approx([0.128, 8.192, 32.768])]
    assert table["decode_ms"]["extrapolated"] == [(8, 4096)]


def test_a_line_with_one_measured_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NeverFullError, match="a batch of 8 ran with 1 of the contexts 16, 1024, 4096"):
        measured_table(monkeypatch, fits=4096)
    with pytest.raises(NeverFullError, match="a batch of 1 ran with 0 of the contexts"):
        measured_table(monkeypatch, fits=0)
