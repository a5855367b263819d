"""bench.rollout's options: which cells they leave, and which sizes they give."""

import json
from pathlib import Path

import pytest

from bench import record
from bench.pace_tables import TABLES
from bench.rollout.__main__ import arguments, cells_of, changed, configuration, measured_before, preset_of
from bench.rollout.presets import FEW, MAIN, Cell, Paced


def cells(*options: str) -> list[Cell]:
    args = arguments(list(options))
    return cells_of(args, preset_of(args), [])


def test_ablation_tables_include_factors_for_client_side_variants() -> None:
    chosen = cells("--ablation", "n 8")
    tried, rest = chosen[:4], chosen[4:]
    assert [(cell.variant, cell.plan.n) for cell in tried if cell.plan and cell.tries] == [("outside", 8)] * 4
    assert [cell.variant for cell in rest] == [*FEW, *FEW]
    drained = cells("--ablation", "drain")
    assert {cell.variant for cell in drained if cell.tries} == {"outside"}
    assert {cell.distribution for cell in drained if cell.drain} == {"lognormal", "extreme:100"}
    assert not any(cell.tries for cell in cells("--ablation", "knobs"))
    trainer = cells("--ablation", "trainer 0.5")
    assert {cell.variant for cell in trainer if cell.tries} == {"async"}


def test_trace_lengths_are_not_cut(tmp_path: Path) -> None:
    """Its longest response fits the server's context, and nothing is cut that the source has."""
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([3, 5000, 70]))
    for name, longest in (("extreme:200", 4000), (f"trace:{trace}", 5000)):
        preset = preset_of(arguments(["--distribution", name]))
        assert preset.lengths(name).grid[-1] == preset.longest == longest
        assert preset.context > longest + preset.prompt_tokens
    preset = preset_of(arguments(["--preset", "april/8", "--distribution", "extreme:500"]))
    assert preset.lengths("extreme:500").grid[-1] == 16_000 < preset.context


@pytest.mark.parametrize("text", ["[]", "{}", "no json"])
def test_invalid_trace_is_refused(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(text)
    with pytest.raises(SystemExit, match=f"--distribution trace:{trace}"):
        preset_of(arguments(["--distribution", f"trace:{trace}"]))


def test_table_of_some_variants_is_marked_as_changed() -> None:
    assert changed(arguments([])) == []
    assert changed(arguments(["--variants", "april-keep"])) == ["variants"]


@pytest.mark.parametrize("preset", ["cpu", "april/8", "april-paced", "april-paced-30b-a3b"])
def test_options_that_change_results_are_marked(preset: str) -> None:
    given = arguments(["--preset", preset, "--distribution", "pareto", "--over-sampling", "3"])
    assert changed(given) == ["distribution", "over_sampling"]


def test_variants_of_a_paced_preset_can_be_measured_apart() -> None:
    assert changed(arguments(["--preset", "april-paced", "--variants", "april-keep"])) == []


def test_paced_preset_starts_servers_of_its_own_at_the_pace_of_a_table() -> None:
    args = arguments(["--preset", "april-paced/8", "--pace", str(TABLES / "qwen3-4b-mi300x.json")])
    preset = preset_of(args)
    assert isinstance(preset, Paced)
    assert (preset.plan.groups, preset.plan.n, preset.plan.slots, preset.longest) == (32, 8, 256, 2048)
    assert configuration(args, preset)["paced"] == "Qwen3-4B on one MI300X, modelled"
    assert changed(args) == ["pace"]
    # A row is 256 tokens of prompt and half of a running sample; 256 rows take a step of the table.
    step_s = preset.table.decode.at(256, 256 + preset.lengths("lognormal").running_mean / 2) / 1e3
    assert preset.limit("lognormal") == pytest.approx(256 / step_s)
    with pytest.raises(SystemExit, match="starts its own"):
        preset_of(arguments(["--preset", "april-paced/8", "--server", "http://localhost:1"]))
    with pytest.raises(SystemExit, match="at this machine's own speed"):
        preset_of(arguments(["--preset", "cpu", "--pace", "table.json"]))


def test_paced_preset_has_the_main_variants_and_async() -> None:
    assert [cell.variant for cell in cells("--preset", "april-paced/4")] == [*MAIN, "async", "april-continue"]


def test_only_rows_of_the_same_configuration_and_gpu_count_as_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "gpu_name", lambda: "GPU X")
    out = tmp_path / "rows.json"

    def left(*options: str) -> int:
        args = arguments(["--run-id", "r", "--out", str(out), *options])
        preset = preset_of(args)
        return len(cells_of(args, preset, measured_before(args, preset)))

    small, sizes = ["--variants", "april-keep"], ["--preset", "april/8", "--gpu-gb", "80"]
    args = arguments([*sizes, *small])
    preset = preset_of(args)
    row = {"run_id": "r", "preset": preset.name, "machine": {"gpu": "GPU X"}}
    row |= {"configuration": configuration(args, preset), "rounds": preset.measured}
    measured = [
        {**row, **{key: getattr(cell, key) for key in ("distribution", "variant", "ablation", "repetition")}}
        for cell in cells_of(args, preset, [])
    ]
    record.append_rows(out, measured)
    assert left(*sizes, *small) == 0
    assert left("--preset", "april/8", "--gpu-gb", "141", *small) == len(measured)
    assert left(*sizes, *small, "--seed", "1") == len(measured)
    monkeypatch.setattr(record, "gpu_name", lambda: "GPU Y")
    assert left(*sizes, *small) == len(measured)
