"""Tables of docs about attached requests, computed from the rows of `bench.agents`."""

from statistics import mean, median, stdev

from bench.record import Row, newest

VARIANTS = {
    "attached": "attached",
    "trajectory": "attached, in trajectories",
    "in_place": "stock, `in_place`",
    "resend": "stock, abort and send again",
}


def pairs(rows: list[Row]) -> tuple[list[Row], list[list[str]]]:
    """Output tokens/s of `sglang.bench_serving`, relative to the stock server of the same pair."""
    used: list[Row] = []
    cells = [["requests to the patched server", "output tokens/s, relative to the stock server", "spread"]]
    for preset, pace in (("cpu", "tiny model on two cores"), ("paced", "paced: not measured on a GPU")):
        mine = newest([row for row in rows if (row.get("bench"), row.get("preset")) == ("agents pairs", preset)])
        for case in ("unattached", "attached"):
            ratios = [row["ratio"] for row in mine if row["case"] == case]
            if len(ratios) > 1:
                error = stdev(ratios) / len(ratios) ** 0.5
                spread = f"mean {mean(ratios):.3f}, standard error {error:.3f}, {len(ratios)} pairs"
                cells.append([f"{case}, {pace}", f"{median(ratios):.3f}", spread])
        used += mine
    return used, cells


def turns(rows: list[Row], preset: str) -> tuple[list[Row], list[list[str]]]:
    """Delivered trajectories/s and re-prefilled tokens of each variant; medians over the repetitions of a load."""
    used = newest([row for row in rows if (row.get("bench"), row.get("preset")) == ("agents turns", preset)])
    cells = [["turns, tool call, push", "requests", "trajectories/s", "× abort and send again"]]
    cells[0] += ["pushes", "re-prefilled tokens per turn after the first"]
    for load in dict.fromkeys((row["turns"], row["tool_s"], row["push_s"]) for row in used):
        several, tool_s, push_s = load
        every = f"every {push_s:g} s" if push_s else "none"
        for variant, title in VARIANTS.items():
            mine = [
                row
                for row in used
                if (row["turns"], row["tool_s"], row["push_s"]) == load and row["variant"] == variant
            ]
            rates = [row["trajectories_per_s"] for row in mine]
            spread = f" ({min(rates):.2f} to {max(rates):.2f})" if len(rates) > 1 else ""
            later = [row["reprefilled_tokens"] / row["trajectories"] / (several - 1) for row in mine]
            line = [f"{several}, {tool_s:g} s, {every}", title, f"{median(rates):.2f}{spread}"]
            line += [f"{median(row['ratio'] for row in mine):.2f}", f"{median(row['pushes'] for row in mine):.0f}"]
            cells.append([*line, f"{round(median(later), 1) + 0.0:.1f}"])  # no "-0.0"
    return used, cells
