"""Tables of docs about attached requests, computed from the rows of `bench.agents`."""

from statistics import mean, median, stdev

from bench.record import Row, newest_run

VARIANTS = {
    "attached": "attached",
    "trajectory": "attached, in trajectories",
    "in_place": "stock, `in_place`",
    "resend": "stock, abort and send again",
}


def spread(ratios: list[float]) -> str:
    """Mean and standard error of the ratios of at least two pairs."""
    return f"{_mean(ratios)}, {len(ratios)} pairs"


def _mean(ratios: list[float]) -> str:
    return f"mean {mean(ratios):.3f}, standard error {stdev(ratios) / len(ratios) ** 0.5:.3f}"


def _spread_of_launches(rows: list[Row]) -> str:
    """Of the launches' means: pairs of one launch have its servers in common."""
    launches: dict[int, list[float]] = {}
    for row in rows:
        launches.setdefault(row.get("launch", 0), []).append(row["ratio"])
    if len(launches) == 1:
        return spread([row["ratio"] for row in rows])
    return f"{_mean([mean(ratios) for ratios in launches.values()])}, {len(launches)} launches, {len(rows)} pairs"


def pairs(rows: list[Row]) -> tuple[list[Row], list[list[str]]]:
    """Output tokens/s of `sglang.bench_serving`, relative to the stock server of the same pair."""
    used: list[Row] = []
    titles = "requests to the other server", "output tokens/s, relative to the stock server", "spread"
    cells = [[*titles, "CPU time per request"]]
    for preset, pace in (("cpu", "tiny model on two cores"), ("paced", "paced: not measured on a GPU")):
        mine = newest_run([row for row in rows if (row.get("bench"), row.get("preset")) == ("agents pairs", preset)])
        for case in ("control", "unattached", "attached"):
            of_case = [row for row in mine if row["case"] == case]
            if len(of_case) > 1:
                ms, of_stock = (
                    median(row["cpu_ms_per_request"] for row in mine if row["case"] == one)
                    for one in (case, f"stock beside {case}")
                )
                title = "stock too (control)" if case == "control" else case
                ratio, cpu = median(row["ratio"] for row in of_case), f"{ms:.1f} ms (stock: {of_stock:.1f} ms)"
                cells.append([f"{title}, {pace}", f"{ratio:.3f}", _spread_of_launches(of_case), cpu])
        used += mine
    return used, cells


def turns(rows: list[Row], preset: str) -> tuple[list[Row], list[list[str]]]:
    """Delivered trajectories/s and re-prefilled tokens of each variant; medians over the repetitions of a load.

    Each load comes from the newest run that has it.
    """
    cells = [["turns, tool call, push", "requests", "trajectories/s", "× abort and send again"]]
    cells[0] += ["pushes", "re-prefilled tokens per turn after the first"]
    loads: dict[tuple[int, float, float], list[Row]] = {}
    for row in rows:
        if (row.get("bench"), row.get("preset")) == ("agents turns", preset):
            loads.setdefault((row["turns"], row["tool_s"], row["push_s"]), []).append(row)
    used: list[Row] = []
    for (count, tool_s, push_s), of_all_runs in loads.items():
        of_load = newest_run(of_all_runs)
        used += of_load
        every = f"every {push_s:g} s" if push_s else "none"
        for variant, title in VARIANTS.items():
            mine = [row for row in of_load if row["variant"] == variant]
            rates = [row["trajectories_per_s"] for row in mine]
            limits = f" ({min(rates):.2f} to {max(rates):.2f})" if len(rates) > 1 else ""
            again = median(row["reprefilled_tokens"] / row["trajectories"] / (count - 1) for row in mine)
            line = [f"{count}, {tool_s:g} s, {every}", title, f"{median(rates):.2f}{limits}"]
            line += [f"{median(row['ratio'] for row in mine):.2f}", f"{median(row['pushes'] for row in mine):.0f}"]
            cells.append([*line, f"{round(again, 1) + 0.0:.1f}"])  # no "-0.0"
    return used, cells
