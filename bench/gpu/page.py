"""The page of ``make gpu``: what passed, the rows that were measured, and the cells of README that they fill."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import record
from bench.gpu.pieces import GpuSetting, Piece
from bench.record import Row
from bench.report import markdown
from bench.tables import headline_table

Status = Mapping[str, Any]
"""Result of a piece: `state` (passed, continues, failed, timed out, interrupted), `seconds`, `at`, `commit` and
`run_id`."""

README_CELLS: dict[str, tuple[str, ...]] = {
    "resume is exact": ("resume default", "live resume", "live features", "live pools", "live store"),
    "no forward after the quota": ("live stop",),
    "every sample delivered exactly once": ("live conservation", "live interruptions", "live kill"),
    "spans and logprobs of two policies": ("live versions",),
    "trainer equals Hugging Face": (),
    "page and sampling kernels": ("kernel tests",),
    "each safety check": ("live guards",),
}
"""The start of each row of README's table, and the pieces that fill its GPU cell; without any, `make gpu` cannot."""


def page(setting: GpuSetting, chosen: Sequence[Piece], state: Mapping[str, Status]) -> str:
    """Markdown, one page."""
    machine = record.machine()
    title = (
        "Rehearsal on the CPU platform: it shows that the pieces run, and nothing about a GPU"
        if setting.rehearsal
        else "GPU"
    )
    parts = [
        f"# {title}\n",
        f"{machine['gpu'] or machine['cpu']}; "
        + ", ".join(f"{name} {version}" for name, version in record.versions().items() if version)
        + "\n",
        _pieces(setting, chosen, state),
        _cells(setting, state, machine["gpu"]),
        *(_section(title, setting.rows(name), show) for title, name, show in SECTIONS),
    ]
    return "\n".join(part for part in parts if part)


def _pieces(setting: GpuSetting, chosen: Sequence[Piece], state: Mapping[str, Status]) -> str:
    lines = [["piece", "result", "seconds", "commit", "log"]]
    for piece in chosen:
        status = state.get(piece.name, {"state": "not run", "seconds": 0})
        commit = status.get("commit", "")
        cells = [piece.name, status["state"], f"{status['seconds']:.0f}", commit[:8] + commit[40:]]
        lines.append([*cells, log_of(setting.folder, piece).name])
    passed = sum(line[1] == "passed" for line in lines)
    return f"## {passed} of {len(chosen)} pieces passed\n\n{markdown(lines)}"


def _cells(setting: GpuSetting, state: Mapping[str, Status], gpu: str | None) -> str:
    if setting.rehearsal:
        return ""
    lines = [["row of README", "its cell for a GPU"]]
    for row, needed in README_CELLS.items():
        missing = [name for name in needed if state.get(name, {}).get("state") != "passed"]
        short = f"not yet ({', '.join(missing)})" if needed else "not yet (needs Megatron on the GPU; no piece has it)"
        lines.append([row, short if missing or not needed else f"yes ({gpu})"])
    return f"## Cells that can be replaced\n\n{markdown(lines)}"


def log_of(folder: Path, piece: Piece) -> Path:
    """The log of a piece."""
    return folder / f"{piece.name.replace(' ', '-').replace('/', '-')}.log"


def _newest(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.get("run_id") == rows[-1].get("run_id")]


def _resume(rows: list[Row]) -> list[list[str]]:
    last = {(row["options"], row["tier"]): row for row in rows}
    lines = [["options", "tier", "equal first tokens", "largest difference of logprobs", "passed"]]
    for (options, tier), row in last.items():
        shares = f"{row['first_token_equal']:.0%}", f"{row['logprob_gap']:.2g}"
        lines.append([options or "default", tier, *shares, "yes" if row["passed"] else "no"])
    return lines


def _stop(rows: list[Row]) -> list[list[str]]:
    took: dict[tuple[str, ...], list[float]] = {}
    for row in _newest(rows):
        size = f"{row['running']} running" if "running" in row else f"{row['reply_tokens']:,} tokens"
        took.setdefault((size, row["variant"], row["format"]), []).append(row["latency_ms"])
    return [["case", "variant", "format", "ms, median"], *([*case, f"{median(ms):.1f}"] for case, ms in took.items())]


def _kernels(rows: list[Row]) -> list[list[str]]:
    newest = _newest(rows)
    skipped = sum(bool(row.get("skipped")) for row in newest)
    return [["cases", "skipped"], [str(len(newest)), str(skipped)]]


def _rollout(rows: list[Row]) -> list[list[str]]:
    found: dict[str, list[Row]] = {}
    for row in _newest(rows):
        if (row["distribution"], row["ablation"]) == ("lognormal", None):
            found.setdefault(row["variant"], []).append(row)
    return headline_table(found)


SECTIONS: tuple[tuple[str, str, Callable[[list[Row]], list[list[str]]]], ...] = (
    ("Resume", "resume", _resume),
    ("From the last finish to the reply", "stop_latency", _stop),
    ("Kernels", "kernels", _kernels),
    ("Rounds, newest run", "rollout", _rollout),
)


def _section(title: str, path: Path, show: Callable[[list[Row]], list[list[str]]]) -> str:
    gpu = record.gpu_name()
    rows = [row for row in record.read_rows(path) if row.get("machine", {}).get("gpu") == gpu]
    return f"## {title}\n\nRows: {path}\n\n{markdown(show(rows))}" if rows else ""
