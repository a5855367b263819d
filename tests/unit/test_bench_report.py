"""bench.report: ratios, tables and README's copied numbers, from made-up rows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import record
from bench.report import main
from bench.tables import ablations_of, aims, better_outside, by_variant, headline, headline_table, newest, table_of


def row(variant: str, tokens: float, groups: float, repetition: int = 0, **rest: Any) -> dict[str, Any]:
    common = {"machine": {"cpu": "some", "cores": 2, "gpu": None}, "versions": {"sglang": "0.5.17"}, "commit": "c" * 40}
    return {
        "bench": "rollout",
        "preset": "cpu",
        "run_id": "r",
        "time": "2026-01-01",
        **common,
        "distribution": "lognormal",
        "ablation": None,
        "variant": variant,
        "repetition": repetition,
        "delivered_tokens_per_s": tokens,
        "delivered_groups_per_s": groups,
        "full_batch_tokens_per_s": 1000,
        "share_of_limit": tokens / 1000,
        "steady": True,
        "biased": False,
        "samples_lost": 0,
        "delivered_tokens": 100,
        "carry_start": 5,
        "carry_end": 6,
        "staleness": {"0": 3},
        "peak_bytes": {},
        "step_ms_by_batch": {"8": 2.0},
        **rest,
    }


PER = ("after the end, a round", "re-prefilled, a token")
ROWS = [
    *(row("synchronous", 100, 10), row("synchronous", 200, 20, 1)),
    *(row("outside", 150, 12), row("outside-retry3s", 160, 14)),
    *(row("april-keep", 180, 15), row("april-keep", 300, 40, 1, biased=True)),
    row("april-keep", 900, 90, ablation="n 8"),
    row("april-keep", 1, 1, run_id="old", time="2025-01-01"),
]


def test_headline_is_the_smaller_ratio_of_equal_repetitions() -> None:
    table = by_variant(newest(ROWS, "cpu"), "lognormal")
    # 180/100 and 15/10; 300/200 and 40/20: the smaller of each is 1.5.
    assert headline(table["april-keep"], table["synchronous"]) == 1.5
    assert headline(table["april-keep"], []) is None
    assert better_outside(table) == table["outside-retry3s"]
    lines = {line[0]: line for line in table_of(table)}
    assert lines["april-keep"][1:6] == ["1.50", "1.07", "–", "2", "240 (180–300)"]
    assert lines["april-keep"][-2:] == ["0", "biased"]
    more = {"plan": {"over_sampling": 1.5}, "tokens_after_end": 12, "rounds": 8, "reprefilled_tokens": 3}
    rows = [row(name, 10, 1, **more, delivered_tokens=6) for name in ("outside", "april-keep")]
    head, *body = table_of(by_variant(rows, "lognormal"))
    shown = [[line[head.index(name)] for name in ("factor", *PER)] for line in body]
    assert shown == [["1.5", "2", "0.50"], ["–", "2", "0.50"]]


def test_table_of_the_readme_shows_what_speed_costs() -> None:
    shares = {"off_policy_share": 0.7, "hybrid_share": 0.2, "reprefilled_tokens": 0}
    head, outside, quota = headline_table(
        by_variant([row("outside", 10, 1), row("april-keep", 20, 2, **shares)], "lognormal")
    )
    costs = [head.index(name) for name in ("re-prefilled per token", "off-policy", "hybrid")]
    assert [quota[i] for i in costs] == ["0.00", "70.0%", "20.0%"]
    assert [outside[i] for i in costs] == ["–", "–", "–"]


def test_cells_measured_separately_are_compared_by_medians() -> None:
    """In units of the full batch, so that a minute in which the machine is fast favors no variant."""
    rows = [*ROWS, row("outside", 900, 90, 1, full_batch_tokens_per_s=3000), row("outside", 100, 9, 2)]
    apart = {"full_batch_tokens_per_s": 500}
    rows += [row("async", 90, 9, **apart), row("async", 30, 3, 1, **apart), row("april-continue", 240, 24)]
    table = by_variant(newest(rows, "cpu"), "lognormal")
    # Medians: (0.18 + 0.06) / 2 of the full batch against 0.15, and 0.012 against 0.012: the smaller is 0.8.
    assert headline(table["async"], table["outside"]) == pytest.approx(0.8)
    lines = {line[0]: line for line in table_of(table)}
    assert lines["april-continue"][1:4] == ["–", "–", "1.33"]
    assert lines["async"][3] == "–"


def test_each_table_comes_from_the_newest_run_that_measured_it() -> None:
    """A new main table does not hide what only an older run has; rows of two runs never share a table."""
    new = {"run_id": "new", "time": "2026-02-01"}
    rows = [*ROWS, row("synchronous", 100, 10, **new), row("april-keep", 250, 25, **new)]
    found = newest(rows, "cpu")
    assert {r["run_id"] for r in found if r["ablation"] is None} == {"new"}
    assert [r["run_id"] for r in found if r["ablation"] == "n 8"] == ["r"]
    assert "outside" not in by_variant(found, "lognormal")


def test_run_with_changed_options_is_not_a_table_of_its_preset() -> None:
    new = {"run_id": "new", "time": "2026-02-01", "changed": ["seed"]}
    assert newest([*ROWS, row("april-keep", 250, 25, **new)], "cpu") == newest(ROWS, "cpu")


def test_cell_measured_again_counts_once() -> None:
    again = {"time": "2026-01-02"}
    rows = [*ROWS, row("synchronous", 400, 40, **again), row("april-keep", 1000, 100, **again)]
    table = by_variant(newest(rows, "cpu"), "lognormal")
    assert [r["delivered_tokens_per_s"] for r in table["april-keep"]] == [1000, 300]
    # The repetition that both have from one process each: 1000 / 400 and 300 / 200.
    assert headline(table["april-keep"], table["synchronous"]) == pytest.approx((2.5 + 1.5) / 2)
    del rows[-2]
    table = by_variant(newest(rows, "cpu"), "lognormal")
    assert headline(table["april-keep"], table["synchronous"]) == pytest.approx(1.5)


def test_interleaved_ablations_form_one_table() -> None:
    knobs = {"together": "knobs", "ks_distance": 0.02}
    rows = [
        row("april-keep", 100, 10, ablation="as it is", **knobs),
        row("april-keep", 90, 8, ablation="cohort", **knobs),
        row("april-keep", 50, 5, ablation="n 8"),
    ]
    lines = ablations_of(rows, "knobs")
    assert [line[:4] for line in lines[1:]] == [
        ["april-keep", "as it is", "1.00", "0.020"],
        ["april-keep", "cohort", "0.80", "0.020"],
    ]
    assert {len(line) for line in lines} == {len(lines[0])}


def test_targets_are_judged_by_the_rows() -> None:
    assert aims(newest(ROWS, "cpu")).splitlines() == [
        "- lognormal: at least 1.6 × synchronous: **missed** (`april-keep` 1.50, rows: 2, biased)",
        "- lognormal: at least 1.25 × outside: **missed** (`april-keep` 1.07, rows: 2, biased)",
        "- lognormal: at least 0.97 of the limit: **missed** (`april-keep` 0.24, rows: 2, biased)",
    ]
    more = [row("april-auto", 170, 17), row("synchronous", 100, 10, distribution="constant")]
    more += [row("april-keep", 100, 98, distribution="constant"), row("april-auto", 97, 10, distribution="constant")]
    reported = aims(newest([*ROWS, *more], "cpu"))
    assert "1.6 × synchronous: **partly** (`april-keep` 1.50, `april-auto` 1.70, rows: 2, biased)" in reported
    assert (
        "constant: at least 0.98 × synchronous: **partly** (`april-keep` 1.00, `april-auto` 0.97, rows: 1)" in reported
    )


@pytest.mark.parametrize(
    ("carry", "verdict"),
    [({"carry_end": 15}, "met"), ({"carry_end": 16}, "not judged"), ({"carry_grown": -11}, "not judged")],
)
def test_row_with_a_shrinking_carry_meets_no_target(carry: dict[str, int], verdict: str) -> None:
    """Waves within the measured rounds are marked, and judged: what was delivered in them was computed in them."""
    rows = [row("synchronous", 100, 10), row("april-keep", 300, 30, steady=False, **carry)]
    reported = aims(newest(rows, "cpu"))
    assert f"1.6 × synchronous: **{verdict}** (`april-keep` 3.00, rows: 1, not steady)" in reported


def test_change_of_machine_speed_is_no_gain() -> None:
    table = by_variant(
        [row("synchronous", 100, 10), row("april-keep", 180, 20, full_batch_tokens_per_s=1200)], "lognormal"
    )
    assert headline(table["april-keep"], table["synchronous"]) == pytest.approx(1.5)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "rollout.json").write_text(json.dumps(ROWS))
    cases = [("x", "1", "a", 1.5), ("x", "1", "a", 1.7), ("x", "1", "b", 8.0), ("y", "2", "b", 7.0)]
    other = [{"bench": "other", "run_id": run, "time": at, "way": way, "value": v} for run, at, way, v in cases]
    (folder / "other.json").write_text(json.dumps(other))
    return folder


def test_readme_is_filled_and_checked(results: Path, tmp_path: Path) -> None:
    text = tmp_path / "README.md"
    command = ["--results", str(results), "--readme", "--pages", str(text)]
    text.write_text(
        "before\n<!-- bench:cpu lognormal -->\nold\n<!-- /bench -->\n"
        "<!-- bench:cpu lognormal full -->\nold\n<!-- /bench -->\nafter\n"
    )
    assert main([*command, "--check"]) == 1
    assert main(command) == 0
    assert main([*command, "--check"]) == 0
    filled = text.read_text()
    assert filled.startswith("before\n")
    assert filled.endswith("<!-- /bench -->\nafter\n")
    assert "| **batch quota**, KV kept | 1.50 | 1.07 |" in filled
    assert "| april-keep | 1.50 | 1.07 | – | 2 |" in filled
    text.write_text(filled.replace("| 1.50 |", "| 1.51 |", 1))
    assert main([*command, "--check"]) == 1


def test_picture_shows_the_rows_of_the_table(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, drawn = tmp_path / "README.md", tmp_path / "p.svg"
    page.write_text("nothing measured\n")
    command = ["--results", str(results), "--readme", "--picture", str(drawn), "--pages", str(page)]
    assert main([*command, "--check"]) == 1
    assert f"{drawn} differs from the rows" in capsys.readouterr().err
    assert main(command) == 0
    first = drawn.read_bytes()
    assert main([*command, "--check"]) == 0
    assert main(command) == 0
    assert drawn.read_bytes() == first
    rows = json.loads((results / "rollout.json").read_text())
    (results / "rollout.json").write_text(json.dumps([row | {"delivered_tokens_per_s": 7.0} for row in rows]))
    assert main([*command, "--check"]) == 1


def test_a_readme_without_markers_passes(results: Path, tmp_path: Path) -> None:
    text = tmp_path / "README.md"
    text.write_text("nothing measured\n")
    command = ["--results", str(results), "--readme", "--pages", str(text)]
    assert main(command) == 0
    assert main([*command, "--check"]) == 0
    assert text.read_text() == "nothing measured\n"


def test_the_page_has_every_table(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["--results", str(results), "--out", str(out)]) == 0
    page = out.read_text()
    assert page.count('<img src="data:image/svg+xml;base64,') == 1
    assert "<h3>lognormal, n 8</h3>" in page
    assert "<h2>other</h2>" in page
    assert "<td>2</td><td>x</td><td>1</td><td>a</td><td>1.6</td>" in page, "the median of a case"
    assert "<td>1</td><td>y</td><td>2</td><td>b</td><td>7</td>" in page, "the newest run that has it"
    assert "<td>5 → 6</td>" in page
    assert "over-sampling against" not in page


def test_the_page_marks_the_knee_of_over_sampling(results: Path, tmp_path: Path) -> None:
    more = {
        "peak_bytes": {"device": 10},
        "carry_end": 1,
        "seconds": 8.0,
        "rounds": 8,
        "plan": {"slots": 4, "over_sampling": 1.0},
    }
    rows = [
        row("april-factor", 100, 10, ablation="over-sampling 1", mean_running=1, **more),
        row(
            "april-keep",
            180,
            15,
            mean_running=3,
            ablation="over-sampling demand-driven",
            **{**more, "peak_bytes": {"device": 20}},
        ),
    ]
    (results / "rollout.json").write_text(json.dumps(rows))
    out = tmp_path / "report.html"
    assert main(["--results", str(results), "--out", str(out)]) == 0
    page = out.read_text()
    assert "over-sampling against demand-driven admission" in page
    assert "<td>knee</td>" in page


def test_page_is_self_contained(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    main(["--results", str(results), "--out", str(out)])
    page = out.read_text()
    assert "http" not in page.replace("http-equiv", "")


def test_paced_rows_are_marked_and_have_a_table_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    paced = {"preset": "april-paced/8", "configuration": {"paced": "Qwen3-4B on one H100 SXM, modelled"}}
    rows = [*ROWS, row("synchronous", 5000, 500, **paced), row("april-keep", 9000, 900, **paced)]
    (folder / "rollout.json").write_text(json.dumps(rows))
    page = tmp_path / "page.md"
    markers = [f"<!-- bench:{name} lognormal full -->\n<!-- /bench -->\n" for name in ("cpu", "april-paced/8")]
    page.write_text("".join(markers))
    assert main(["--results", str(folder), "--readme", "--pages", str(page)]) == 0
    first, second = page.read_text().split("<!-- /bench -->")[:2]
    assert "paced" not in first.lower()
    assert "9,000" not in first
    assert "**Paced, not measured on a GPU**: Qwen3-4B on one H100 SXM, modelled" in second
    assert second.count("| paced |") == 2
    assert "The aims" not in second


def test_readmes_claim_is_that_of_its_table() -> None:
    """The numbers above the picture are those of the last row, which `bench.report --readme --check` compares."""
    page = (record.ROOT / "README.md").read_text()
    claim = page[page.index("**RL rollouts") : page.index("\n\nIn RL")]
    (row,) = [line for line in page.splitlines() if line.startswith("| **batch quota**, KV kept")]
    assert re.findall(r"(\d\.\d\d)", claim) == re.findall(r"(\d\.\d\d)", row)[:2]
    limit = re.search(r"the quota reaches (\d\.\d\d); the aim is (\d\.\d\d)", page.replace("\n", " "))
    assert limit is not None
    benchmarks = (record.ROOT / "docs" / "benchmarks.md").read_text()
    assert f"at least {limit[2]} of the limit: **missed** (`april-keep` {limit[1]}" in benchmarks
