"""`make gpu`: its commands exist, what passed is skipped, and its page fills cells that README has."""

import dataclasses
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import record
from bench.gpu import __main__ as gpu
from bench.gpu.page import README_CELLS, log_of, page
from bench.gpu.pieces import CONTINUES, LIVE, NOT_ON_ONE_GPU, RUN_ID, GpuSetting, Piece, pieces
from tests.support.live import until


def setting(kind: str, folder: Path = Path("out/gpu")) -> GpuSetting:
    return GpuSetting(kind, folder, folder / "results", 80)


def test_live_tests_on_a_gpu_use_no_kernel_that_takes_half_precision_only(monkeypatch: pytest.MonkeyPatch) -> None:
    multi_platform = pytest.importorskip("sglang.srt.layers.utils.multi_platform")
    layernorm = importlib.import_module("sglang.srt.layers.layernorm")
    from tests.support.plain_layers import plain_layers

    monkeypatch.setattr(multi_platform, "_is_cuda", True)
    op = multi_platform.MultiPlatformOp
    monkeypatch.setattr(op, "dispatch_forward", op.dispatch_forward)
    assert layernorm.RMSNorm(8)._forward_method.__name__ == "forward_cuda"
    plain_layers()
    assert layernorm.RMSNorm(8)._forward_method.__name__ == "forward_native"
    live = [piece for piece in pieces(setting("cuda")) if piece.name.startswith("live ")]
    assert all(dict(piece.environment)["TRITON_F32_DEFAULT"] == "ieee" for piece in live)


def test_no_server_is_forked_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's models initialise CUDA when they are imported."""
    conftest = importlib.import_module("tests.integration.conftest")
    for name in ("spawn", "wait", "stop"):
        monkeypatch.setattr(conftest.Server, name, lambda _server: None)
    forked = {}
    for there in (False, True):
        monkeypatch.setattr(conftest, "has_gpu", lambda there=there: there)
        pool = conftest.Pool(lambda _family, _seed: tmp_path, tmp_path)
        forked[there] = pool.get("small", [], forked=True).fork_server is not None
    assert forked == {False: True, True: False}


def test_only_gpus_that_fa3_runs_on_have_its_piece() -> None:
    there = dataclasses.replace(setting("cuda"), major=10)
    assert {p.name for p in pieces(setting("cuda"))} - {p.name for p in pieces(there)} == {"resume fa3"}


@pytest.mark.parametrize("kind", ["cuda", "rocm", "cpu"])
def test_commands_have_only_options_that_exist(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[tuple[str, ...], str] = {}
    for piece in pieces(setting(kind)):
        module, *rest = piece.command[2:]
        if module == "pytest":
            assert (record.ROOT / rest[-1]).exists()
            continue
        subcommand = (rest[0],) if rest and not rest[0].startswith("-") and module == "bench.pace" else ()
        if (module, *subcommand) not in known:
            name = f"{module}.__main__" if module in ("bench.rollout", "examples.april_demo") else module
            main = importlib.import_module(name).main
            monkeypatch.setattr(sys, "argv", [module, *subcommand, "--help"])
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == 0
            known[module, *subcommand] = capsys.readouterr().out
        missing = {word for word in rest if word.startswith("--") and " " not in word} - set(
            known[module, *subcommand].replace(",", " ").replace("[", " ").replace("]", " ").split()
        )
        assert not missing, f"{piece.name}: {missing}"


def test_names_are_distinct_and_every_piece_of_the_page_exists() -> None:
    for kind in ("cuda", "rocm", "cpu"):
        found = pieces(setting(kind))
        names = [piece.name for piece in found]
        assert len(set(names)) == len(names)
        assert len({log_of(Path(), piece) for piece in found}) == len(names)
    on_gpu = {piece.name for piece in pieces(setting("cuda"))}
    assert {name for needed in README_CELLS.values() for name in needed} <= on_gpu


CANNOT = ("unpacked(", "sglang_router(", "pip(", "--april-cpu-")
"""In the source of live tests that download packages, or that run on the CPU platform only."""


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_live_pieces_download_nothing_and_can_run_on_a_gpu(kind: str) -> None:
    live = {piece.command[-1] for piece in pieces(setting(kind)) if piece.name.startswith("live ")}
    assert live
    for path in live:
        source = (record.ROOT / path).read_text()
        assert not [word for word in CANNOT if word in source], path


def test_every_live_test_that_is_no_piece_exists_and_has_a_reason() -> None:
    assert all(NOT_ON_ONE_GPU.values())
    assert set(NOT_ON_ONE_GPU) <= {path.stem for path in LIVE.glob("test_*.py")}


def test_cells_are_rows_of_readme() -> None:
    lines = (record.ROOT / "README.md").read_text().splitlines()
    for row in README_CELLS:
        assert any(line.startswith(f"| {row}") and line.endswith("| not yet |") for line in lines), row


def script(name: str, code: str) -> Piece:
    return Piece(name, (sys.executable, "-c", code))


def test_what_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    once = f"open({str(count)!r}, 'a').write('x')"
    chosen = [
        script("good", once),
        script("bad", "raise SystemExit(3)"),
        script("part", f"print({CONTINUES!r})"),
    ]
    monkeypatch.setattr(gpu, "pieces", lambda _: chosen)
    monkeypatch.setattr(gpu, "setting_of", lambda _: setting("cpu", tmp_path))
    assert gpu.main([]) == 1
    assert gpu.main([]) == 1
    assert gpu.main(["--only", "good"]) == 0
    assert count.read_text() == "x"
    assert gpu.main(["--only", "good", "--again"]) == 0
    assert count.read_text() == "xx"
    state = json.loads((tmp_path / "state.json").read_text())
    assert {name: status["state"] for name, status in state.items()} == {
        "good": "passed",
        "bad": "failed",
        "part": "continues",
    }
    assert "| bad | failed |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("commit", ["0123456789", ""])
def test_a_run_id_is_kept_until_its_piece_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    """Also outside of a repository, which has no commit."""
    starts = iter("abcd")
    monkeypatch.setattr(time, "strftime", lambda *_: next(starts))
    monkeypatch.setattr(record, "commit", lambda: commit)
    seen: list[str] = []

    def run_piece(piece: Piece, _folder: Path) -> dict[str, Any]:
        seen.append(piece.command[-1])
        kept = json.loads((tmp_path / "state.json").read_text())[piece.name]
        assert (kept["state"], kept["run_id"]) == ("interrupted", seen[-1])
        return {"state": "passed" if len(seen) > 1 else "continues", "seconds": 1.0}

    monkeypatch.setattr(gpu, "run_piece", run_piece)
    monkeypatch.setattr(gpu, "pieces", lambda _: [Piece("april/8", ("run", "--run-id", RUN_ID))])
    monkeypatch.setattr(gpu, "setting_of", lambda _: setting("cpu", tmp_path))
    assert [gpu.main([]), gpu.main([]), gpu.main(["--again"])] == [1, 0, 0]
    assert seen == [f"gpu-april-8-{commit[:8]}-{start}" for start in "aab"]


def test_a_piece_that_was_interrupted_at_another_commit_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(gpu, "pieces", lambda _: [Piece("april/8", ("run", "--run-id", RUN_ID))])
    monkeypatch.setattr(gpu, "setting_of", lambda _: setting("cpu", tmp_path))
    monkeypatch.setattr(gpu, "page", lambda *_: "")

    def run_piece(piece: Piece, _folder: Path) -> dict[str, Any]:
        seen.append(piece.command[-1])
        return {"state": "continues", "seconds": 1.0}

    monkeypatch.setattr(gpu, "run_piece", run_piece)
    for commit in "ab":
        monkeypatch.setattr(record, "commit", lambda commit=commit: commit * 40)
        assert gpu.main([]) == 1
    assert [name.split("-")[3] for name in seen] == ["aaaaaaaa", "bbbbbbbb"]


def test_page_names_the_commit_of_each_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "commit", lambda: "f" * 40)
    chosen = [script("old", ""), script("new", "")]
    state = {
        name: {"state": "passed", "seconds": 1.0, "commit": commit}
        for name, commit in (("old", "a" * 40), ("new", "b" * 40 + "+changes"))
    }
    text = page(setting("cpu", tmp_path), chosen, state)
    assert "| old | passed | 1 | aaaaaaaa | old.log |" in text
    assert "| new | passed | 1 | bbbbbbbb+changes | new.log |" in text
    assert "ffffffff" not in text


def test_piece_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    status = gpu.run_piece(script("long", code), tmp_path, limit_s=5)
    assert status["state"] == "timed out"
    child = int((tmp_path / "pid").read_text())
    until(lambda: not _runs(child), "the killed child is gone")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_page_lists_the_cells_that_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine: dict[str, Any] = {"gpu": "GPU X", "cpu": "c", "cores": 2, "os": "Linux"}
    monkeypatch.setattr(record, "machine", lambda: machine)
    monkeypatch.setattr(record, "gpu_name", lambda: "GPU X")
    there = GpuSetting("cuda", tmp_path, tmp_path, 80)
    state = {piece.name: {"state": "passed", "seconds": 1.0} for piece in pieces(there)}
    state["live kill"] = {"state": "failed", "seconds": 9.0}
    rows = [{"run_id": "r", "machine": machine, "running": 64, "variant": "april", "format": "json", "latency_ms": 5.0}]
    record.append_rows(tmp_path / "stop_latency.json", rows)
    text = page(there, pieces(there), state)
    assert "| resume is exact | yes (GPU X) |" in text
    assert "| every sample delivered exactly once | not yet (live kill) |" in text
    assert "| trainer equals Hugging Face | not yet (needs Megatron on the GPU; no piece has it) |" in text
    assert "| 64 running | april | json | 5.0 |" in text


def test_without_a_gpu_only_a_rehearsal_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match="GPU_ARGS=--rehearse"):
        gpu.main([])
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    with pytest.raises(SystemExit, match="this one has one"):
        gpu.main(["--rehearse"])
