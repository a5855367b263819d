"""Tables of docs about agents over weight pushes, computed from the rows of `bench.agents`."""

from statistics import median

from bench.record import Row, newest_run

VARIANTS = {
    "attached": "attached",
    "trajectory": "attached, in trajectories",
    "in_place": "stock, `in_place`",
    "resend": "stock, abort and send again",
}


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
