"""Tables of docs about the scheduler loop, computed from the rows of `bench.timeline` and `bench.host_time`."""

from statistics import median

from bench.record import Row, newest_run

PARTS = {
    "forward": ("decode",),
    "sampling and the rest of `run_batch`": ("sample", "run"),
    "results: tokens into requests": ("results",),
    "choosing the next batch": ("next",),
    "rest of the loop": ("loop",),
    "prefills of leaders": ("prefill",),
    "between two rounds: push, request, reply": ("requests", "between"),
}
PACED = {"april-paced/8": "up to 2k", "april-paced/4": "up to 4k", "april-paced": "up to 16k"}
ONLY_IN_ROUNDS = ("prefills of leaders", "between two rounds: push, request, reply")


def timeline(rows: list[Row]) -> tuple[list[Row], list[list[str]]]:
    """Milliseconds per step of the scheduler's loop, in rounds and with a full batch."""
    used = newest_run(_timeline(rows, "cpu"))
    columns = {row["what"]: row for row in used}
    cells = [["ms per step", *(f"{what}, {row['rows']:.4g} rows" for what, row in columns.items())]]
    totals = dict.fromkeys(columns, 0.0)
    for title, names in PARTS.items():
        line = [title]
        for what, row in columns.items():
            ms = sum(row[name] for name in names) * row["seconds"] / row["steps"] * 1000
            shown = what == "rounds" or title not in ONLY_IN_ROUNDS
            totals[what] += ms if shown else 0.0
            line.append(f"{ms:.2f}" if shown else "")
        cells.append(line)
    return used, [*cells, ["total", *(f"{total:.2f}" for total in totals.values())]]


def timeline_paced(rows: list[Row]) -> tuple[list[Row], list[list[str]]]:
    """The time between two rounds at a GPU's pace."""
    used = [
        row
        for preset in PACED
        for variant in ("april-keep", "april-continue")
        for row in newest_run([row for row in _timeline(rows, preset) if row["variant"] == variant])
    ]
    head = ["variant", "lengths", "running", "of the limit", "step, ms", "end of the last forward to reply, ms"]
    cells = [[*head, "push, ms", "push to first launch, ms", "idle between two rounds, without push, steps"]]
    names = "step_ms", "after_ms", "push_ms", "start_ms", "idle_steps"
    for row in used:
        line = [row["variant"], PACED[row["preset"]], f"{row['rows']:.1f}", f"{row['share_of_limit']:.2f}"]
        cells.append([*line, *(f"{row[name]:.1f}" if name in row else "–" for name in names)])
    return used, cells


def _timeline(rows: list[Row], preset: str) -> list[Row]:
    return [row for row in rows if (row.get("bench"), row.get("preset")) == ("timeline", preset)]


def host_time(rows: list[Row]) -> tuple[list[Row], list[list[str]]]:
    """CPU time of the scheduler loop per decode step, outside of the model and of drawing tokens."""
    loads: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row.get("bench") == "host_time":
            loads.setdefault((row.get("n", 1), row.get("prompt", 16)), []).append(row)
    used: list[Row] = []
    cells = [["running", "stock, ms (lowest to highest)", "batch quota, ms", "more than stock, ms"]]
    for (n, prompt), of_load in sorted(loads.items()):
        newest = newest_run(of_load, case=lambda row: (row["running"], row["server"]))
        used += newest
        title = "" if n == 1 else f", {n} to a prompt of {prompt:,} tokens"
        for running in sorted({row["running"] for row in newest}):
            found = {
                server: [row["host_ms"] for row in newest if (row["running"], row["server"]) == (running, server)]
                for server in ("stock", "batch quota")
            }
            if not all(found.values()):
                continue
            spread = [f"{median(ms):.2f} ({min(ms):.2f} to {max(ms):.2f})" for ms in found.values()]
            more = median(found["batch quota"]) - median(found["stock"])
            cells.append([f"{running:,}{title}", *spread, f"{more:+.2f}"])
    return used, cells
