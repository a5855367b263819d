"""bench/kernels.py runs on a machine without a GPU and writes complete rows."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import kernel_cases, kernels
from bench.kernel_cases import KernelCase


@pytest.fixture(autouse=True)
def _without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing SGLang's memory pool takes longer than the rest of the test."""
    monkeypatch.setattr(kernel_cases, "_sglang_pool", lambda *_: (None, "left out of the test"))


def test_rows_are_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "kernels.json"
    size = ["--device", "cpu", "--layers", "1", "--heads", "2", "--dim", "16", "--tokens", "5", "40"]
    kernels.main([*size, "--out", str(out), "--plot", str(tmp_path)])
    first = json.loads(out.read_text())
    kernels.main([*size, "--out", str(out)])
    rows = json.loads(out.read_text())
    assert rows[: len(first)] == first
    assert len({row["run_id"] for row in rows}) == 2
    timed = [row for row in first if "skipped" not in row]
    assert {"copy peak", "pack, random slots", "unpack, random slots", "checksum alone"} <= {r["name"] for r in timed}
    for row in timed:
        assert row["commit"]
        assert row["machine"]["cpu"]
        assert row["machine"]["gpu"] is None
        assert row["versions"]["torch"]
        assert row["config"]["page_tokens"] == 16
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["gb_per_s"] > 0
        assert (row["share_of_peak"] > 0) if row["peak"] else row["name"] == "copy peak"
    assert {row["skipped"] for row in first if "skipped" in row} == {"left out of the test", "no GPU present"}
    assert (tmp_path / "kernels-copy.png").stat().st_size
    assert "No GPU is used" in capsys.readouterr().out


def test_a_failing_case_costs_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each size are written when it has been measured; the command reports the failure at its end."""
    stock = kernel_cases.cases
    monkeypatch.setattr(kernels, "cases", lambda testbed: _broken(list(stock(testbed)), testbed.tokens))
    out = tmp_path / "kernels.json"
    size = ["--device", "cpu", "--layers", "1", "--heads", "2", "--dim", "16", "--tokens", "5", "40", "7"]
    with pytest.raises(KeyboardInterrupt):
        kernels.main([*size, "--out", str(out)])
    rows = json.loads(out.read_text())
    assert {row["tokens"] for row in rows} == {5, 40}
    failed = [(row["name"], row["tokens"]) for row in rows if row.get("skipped") == "failed: RuntimeError: no kernel"]
    assert failed == [("pack, random slots", 40)]
    with pytest.raises(SystemExit, match="failed: pack, random slots"):
        kernels.main([*size[:-1], "--out", str(out)])


def _broken(found: list[Any], tokens: int) -> list[Any]:
    """At 40 tokens one case fails; at 7, the command is interrupted."""

    def fail() -> None:
        if tokens == 7:
            raise KeyboardInterrupt
        raise RuntimeError("no kernel")

    bad = tokens != 5
    return [replace(case, run=fail) if bad and case.name == "pack, random slots" else case for case in found]


class CaseDevice:
    """A device whose kernels fail where it is waited for, as CUDA's do."""

    def __init__(self) -> None:
        self.error = ""

    def fault(self) -> None:
        self.error = "illegal memory access"

    def synchronize(self, _device: str) -> None:
        error, self.error = self.error, ""
        if error:
            raise RuntimeError(error)

    def do_bench(self, run: Callable[[], object], **_options: Any) -> list[float]:
        """Calls without a wait between them."""
        run()
        return [1.0, 2.0, 3.0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CaseDevice:
    made = CaseDevice()
    monkeypatch.setattr(kernels, "synchronize", made.synchronize)
    monkeypatch.setattr("triton.testing.do_bench", made.do_bench)
    monkeypatch.setattr(kernels, "KernelTestbed", lambda *_: SimpleNamespace(kv_bytes=8))
    return made


def rows_of(found: Iterable[KernelCase], monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Per row on the fake GPU its reason to have no times."""
    monkeypatch.setattr(kernels, "cases", lambda _: found)
    rows = kernels.measured(kernel_cases.KernelConfig(1, 1, 16, "float32", 16), 5, "cuda")
    return {row["name"]: row.get("skipped") for row in rows}


def case(name: str, run: Callable[[], object] = lambda: None) -> KernelCase:
    return KernelCase(name, run, None, 1)


FAULT = "failed: RuntimeError: illegal memory access"


def test_a_fault_that_surfaces_later_costs_the_row_of_its_kernel(
    gpu: CaseDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(["first call", "timed call"])

    def second_fails() -> None:
        if next(calls) == "timed call":
            gpu.fault()

    found = [case("a"), case("first", gpu.fault), case("b"), case("second", second_fails), case("c")]
    assert rows_of(found, monkeypatch) == {"a": None, "first": FAULT, "b": None, "second": FAULT, "c": None}


def test_rows_before_a_fault_that_ends_all_cases_are_kept(gpu: CaseDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Iterator[KernelCase]:
        yield case("a")
        yield case("b", gpu.fault)
        raise RuntimeError("illegal memory access")  # of the next allocation

    assert rows_of(found(), monkeypatch) == {"a": None, "b": FAULT, "all further cases": FAULT}


def test_script_invocation_is_refused() -> None:
    """As a script it would hide Hugging Face's `kernels` from SGLang."""
    script = [sys.executable, str(Path(kernels.__file__))]
    done = subprocess.run(script, capture_output=True, text=True, cwd=Path(kernels.__file__).parents[1])
    assert done.returncode != 0
    assert "python -m bench.kernels" in done.stderr
