"""The table of docs about the plugin's cost, computed from the rows of `bench.overhead`."""

from statistics import mean, median, stdev

from bench.record import Row, newest_run

PACES = (("cpu", "tiny model on two cores"), ("paced", "paced: not measured on a GPU"))
TITLES = {
    "control": "stock too (control)",
    "unattached": "patched; requests not attached",
    "attached": "patched; requests attached to a run",
    "round open": "patched; requests beside an open round",
}


def overhead(rows: list[Row]) -> tuple[list[Row], list[list[str]]]:
    """Output tokens/s of `sglang.bench_serving`, relative to the stock server of the same pair."""
    used: list[Row] = []
    titles = "the other server", "output tokens/s, relative to the stock server", "spread"
    cells = [[*titles, "CPU time per request"]]
    for preset, pace in PACES:
        mine = newest_run([row for row in rows if (row.get("bench"), row.get("preset")) == ("overhead", preset)])
        for case, title in TITLES.items():
            of_case = [row for row in mine if row["case"] == case]
            if len(of_case) > 1:
                ms, of_stock = (
                    median(row["cpu_ms_per_request"] for row in mine if row["case"] == one)
                    for one in (case, f"stock beside {case}")
                )
                ratio, cpu = median(row["ratio"] for row in of_case), f"{ms:.1f} ms (stock: {of_stock:.1f} ms)"
                cells.append([f"{title}, {pace}", f"{ratio:.3f}", _spread(of_case), cpu])
        used += mine
    return used, cells


def _spread(rows: list[Row]) -> str:
    """Of the launches' means: pairs of one launch have its servers in common."""
    launches: dict[int, list[float]] = {}
    for row in rows:
        launches.setdefault(row.get("launch", 0), []).append(row["ratio"])
    if len(launches) == 1:
        return f"{_mean([row['ratio'] for row in rows])}, {len(rows)} pairs"
    return f"{_mean([mean(ratios) for ratios in launches.values()])}, {len(launches)} launches, {len(rows)} pairs"


def _mean(ratios: list[float]) -> str:
    return f"mean {mean(ratios):.3f}, standard error {stdev(ratios) / len(ratios) ** 0.5:.3f}"
