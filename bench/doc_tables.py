"""Tables of docs that are computed from rows of the smaller benchmarks.

``<!-- table:NAME -->`` in a page begins the table NAME of `TABLES`; it ends with ``<!-- /table -->``. Each comes from
the newest run that has it, and begins with a line that names machine and commit.
"""

import re
from collections.abc import Callable
from functools import partial
from statistics import mean, median

from bench import agent_tables, learning_page, loop_tables
from bench.learning_stats import paired
from bench.overhead_table import overhead
from bench.record import Row, newest_run

Cells = list[list[str]]
MARKER = re.compile(r"(<!-- table:(\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def fill(text: str, rows: list[Row]) -> str:
    """A page with its tables computed from the rows. Raises: KeyError: a marker names no table."""

    def table(found: re.Match[str]) -> str:
        used, cells = TABLES[found[2]](rows)
        if not used:
            return f"{found[1]}No rows yet.\n{found[3]}"
        return f"{found[1]}{_source(used)}\n\n{_markdown(cells)}{found[3]}"

    return MARKER.sub(table, text)


def _markdown(cells: Cells) -> str:
    head, *body = cells
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)) + "\n"


def _source(rows: list[Row]) -> str:
    machine, version = rows[0]["machine"], rows[0]["versions"].get("sglang")
    commits = ", ".join(dict.fromkeys(row["commit"][:8] + row["commit"][40:] for row in rows))
    load = max(row["load"] for row in rows)
    days = ", ".join(dict.fromkeys(row["time"][:10] for row in rows))
    run = f"SGLang {version}; {days}; commit {commits}; load up to {load:.1f}"
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    return f"{where}; {run}."


def _of(rows: list[Row], bench: str) -> list[Row]:
    return [row for row in rows if row.get("bench") == bench]


def suspend(rows: list[Row]) -> tuple[list[Row], Cells]:
    """End of a round with running samples, and their return, per tier."""
    used = newest_run(_of(rows, "suspend"))
    head = ["tier", "quota to reply, ms (p50, p99)", "pages copied after, ms", "stall p99, steps"]
    cells = [[*head, "request to all running, ms", "stall p99 then, steps"]]
    for row in used:
        reply = f"{row['reply_ms_p50']:.1f}, {row['reply_ms_p99']:.1f}" if "reply_ms_p50" in row else ""
        copied = f"{row['copy_ms_p50']:.0f}" if row["copy_ms_p50"] else ""
        stall, stall_then = (f"{row[name]:.1f}" for name in ("stall_p99_steps", "resume_stall_p99_steps"))
        tier = row["tier"].replace("sglang get_cpu_copy", "SGLang's `get_cpu_copy` on the scheduler thread")
        cells.append([tier, reply, copied, stall, f"{row['resume_ms_p50']:,.0f}", stall_then])
    return used, cells


def stop_latency(rows: list[Row]) -> tuple[list[Row], Cells]:
    """Medians from the last finish to the last byte at the client, in JSON."""
    cases = [row for row in _of(rows, "stop_latency") if row.get("running")]
    used = newest_run(cases, case=lambda row: (row["running"], row["variant"], row["format"]))
    cells = [["running", "batch quota, ms", "tokens after the quota", "client-side, ms", "tokens after the quota"]]
    for running in sorted({row["running"] for row in used}):
        line = [str(running)]
        for variant in ("april", "outside"):
            mine = [
                row for row in used if (row["running"], row["variant"], row["format"]) == (running, variant, "json")
            ]
            line += [f"{median(row['latency_ms'] for row in mine):.1f}"]
            line += [f"{median(row['tokens_after_end'] for row in mine):.0f}"]
        cells.append(line)
    return used, cells


def large_reply(rows: list[Row]) -> tuple[list[Row], Cells]:
    """The HTTP process and a round of millions of tokens; the newest row of each encoding."""
    found = {row["encoding"]: row for row in sorted(rows, key=lambda row: row["time"]) if "received_mb" in row}
    head = ["reply", "memory before the round, MB", "with all samples received", "peak", "body, MB"]
    head += ["from the end of the round to the last byte, s", "CPU time of the server, s"]
    head += ["longest pause of the event loop, s"]
    cells = [head]
    for encoding, row in found.items():
        sizes = [str(row[name]) for name in ("empty_mb", "received_mb", "peak_mb", "body_mb")]
        times = [f"{row[name]:.2f}" for name in ("reply_s", "server_cpu_s")]
        cells.append([encoding, *sizes, *times, f"{row['stall_ms'] / 1000:.2f}"])
    return list(found.values()), cells


def round_memory(rows: list[Row]) -> tuple[list[Row], Cells]:
    """Memory of every process over one large round, and with the same requests on a stock server."""
    ours, stock = (newest_run([r for r in _of(rows, "round_memory") if r["server"] == of], "time") for of in SERVERS)
    cells = [["process", "idle, MB", "peak, MB", "stock idle", "stock peak"]]
    for row in ours:
        (other,) = (one for one in stock if one["process"] == row["process"])
        cells.append([row["process"], *(f"{one[name]:,}" for one in (row, other) for name in ("idle_mb", "peak_mb"))])
    return ours + stock, cells


def costs(rows: list[Row]) -> tuple[list[Row], Cells]:
    """Cost of the journal, and CPU time of the plugin's bookkeeping."""
    used: list[Row] = []
    cells = [["what", "value", "spread"]]
    if journal := newest_run([row for row in rows if "journal_bytes" in row], "time"):
        runs = [value for values in journal[-1]["runs_tokens_per_s"].values() for value in values]
        spread = f"{len(runs) // 2} runs each, {min(runs):,.0f} to {max(runs):,.0f} tokens/s"
        cells.append(["delivered tokens/s with the journal, relative to none", f"{journal[-1]['ratio']:.3f}", spread])
        used += journal
    if kept := newest_run(_of(rows, "bookkeeping"), "time"):
        row = kept[-1]
        for name, title in (("suspend", "suspending"), ("lookup", "looking up"), ("place", "placing")):
            cells.append([f"CPU time of {title} one of 100,000 partials, µs", f"{row[f'{name}_us']:.1f}", ""])
        cells.append(
            ["comparing decisions of TP ranks, step that starts eight samples, µs", f"{row['decision_us']:.0f}", ""]
        )
        cells.append(["the same, step that decides nothing, µs", f"{row['plain_step_us']:.1f}", ""])
        used += kept
    return used, cells


def prompt_sharing(rows: list[Row]) -> tuple[list[Row], Cells]:
    """Host tokens of all partials after a round, with and without shared prompts."""
    used = newest_run(_of(rows, "prompt_sharing"), "time")
    cells = [["", "`n`", "prompt", "response", "partials", "tokens, shared", "separate", "saved"]]
    for row in used:
        sizes = [f"{row[name]:,}" for name in ("n", "prompt", "mean", "partials")]
        tokens = [f"{row['host_tokens'][name]:,}" for name in ("shared", "separate")]
        cells.append([row["case"], *sizes, *tokens, f"{100 * row['saved']:.0f} %"])
    return used, cells


def kernels(rows: list[Row]) -> tuple[list[Row], Cells]:
    """Page copies on a CPU against SGLang's own."""
    on_cpu = [row for row in _of(rows, "kernels") if not row["machine"].get("gpu")]
    used = [row for row in newest_run(on_cpu, case=lambda row: (row["tokens"], row["name"])) if not row.get("skipped")]
    cells = [
        [
            "tokens",
            "pack, of `get_cpu_copy`'s time",
            "into new memory",
            "unpack, of `load_cpu_copy`'s time",
            "checksum alone",
        ]
    ]
    for tokens in sorted({row["tokens"] for row in used}):
        ms = {row["name"]: row["ms_p50"] for row in used if row["tokens"] == tokens}
        (checksum,) = (row for row in used if (row["tokens"], row["name"]) == (tokens, "checksum alone"))
        line = [f"{tokens:,}"]
        line += [
            f"{ms[name] / ms['sglang get_cpu_copy']:.2f}" for name in ("pack, random slots", "pack into new memory")
        ]
        line += [f"{ms['unpack, random slots'] / ms['sglang load_cpu_copy']:.2f}", f"{checksum['gb_per_s']:.2f} GB/s"]
        cells.append(line)
    return used, cells


LEARNERS = {
    "synchronous": "waiting for all",
    "recompute": "batch quota, `kv: recompute`",
    "keep": "batch quota, `kv: keep`",
    "keep-uncorrected": "the same without a correction",
    "cohort": "`quota_mode: cohort`",
}
QUIET_SEEDS = (2, 3, 4)
"""Seeds whose runs had the machine to themselves, so that their durations are comparable."""


def learning(rows: list[Row]) -> tuple[list[Row], Cells]:
    """Held-out reward after equal numbers of samples, paired over seeds."""
    all_runs = [row for row in _of(rows, "learning") if row["kind"] == "run"]
    used = newest_run(all_runs, case=lambda row: (row["variant"], row["seed"]))
    found = learning_page.by_variant(used)
    base = {seed: row["reward_final"] for seed, row in found.get("synchronous", {}).items()}
    head = ["", "seeds", "held-out reward", "minus waiting for all (95 %)", "off-policy", "≥ 3 versions"]
    cells = [[*head, "on older KV", "length distance", "seconds"]]
    tables = dict(zip(found, learning_page.table(found)[1:], strict=True))
    for name, title in LEARNERS.items():
        runs = found.get(name, {})
        ends = learning_page.ends(runs, found["synchronous"]) if runs else {}
        against = paired(ends, base) if runs and name != "synchronous" else None
        less = (
            ""
            if against is None or against.low is None
            else f"{against.mean:+.3f} ({against.low:+.3f} to {against.high:+.3f})"
        )
        quiet = [runs[seed]["seconds"] for seed in QUIET_SEEDS if seed in runs]
        seconds = f"{mean(quiet):.0f}" if len(quiet) == len(QUIET_SEEDS) else ""
        shares = [_percent(runs, key) for key in ("off_policy_share", "over_three_versions", "hybrid_share")]
        cells.append([title, str(len(runs)), f"{mean(ends.values()):.3f}", less, *shares, tables[name][-1], seconds])
    return used, cells


def _percent(runs: dict[int, Row], key: str) -> str:
    return f"{mean(row[key] for row in runs.values()):.0%}".replace("%", " %")


def int8_error(rows: list[Row]) -> tuple[list[Row], Cells]:
    """What int8 pages change, by the pool's type."""
    used = [row for row in newest_run(_of(rows, "int8_error")) if row["pages"] == "int8"]
    head = ["pool", "largest error, of the head's maximum", "RMS error", "drift of later logprobs: mean, p99, largest"]
    cells = [[*head, "same greedy token"]]
    for row in used:
        drift = ", ".join(f"{row[f'logprob_drift_{name}']:.3f}" for name in ("mean", "p99", "max"))
        errors = [f"{row['kv_error_of_head_max']:.4f}", f"{100 * row['kv_error_rms']:.2f} %"]
        cells.append([row["dtype"], *errors, drift, f"{100 * row['same_greedy_token']:.1f} %"])
    return used, cells


def simulated(rows: list[Row]) -> tuple[list[Row], Cells]:
    """Delivered tokens/s, measured and as the model predicts them."""
    used = newest_run(_of(rows, "simulate validate"))
    cells = [["", "measured", "model", "ratio", "without the fitted costs"]]
    for row in used:
        rates = [f"{row['measured']:,.0f}", f"{row['model']:,.0f}"]
        cells.append([f"`{row['variant']}`", *rates, f"{row['ratio']:.2f}", f"{row['ratio_without_fit']:.2f}"])
    return used, cells


def projected(rows: list[Row]) -> tuple[list[Row], Cells]:
    """What the model predicts for GPUs."""
    used = newest_run(_of(rows, "simulate project"))
    cells = [["setting", "slots", "× synchronous", "× outside", "of the limit"]]
    for row in used:
        ratios = [f"{row[name]:.2f}" for name in ("over_synchronous", "over_outside", "share")]
        cells.append([row["what"], str(row["slots"]), *ratios])
    return used, cells


SERVERS = ("april", "stock")
Table = Callable[[list[Row]], tuple[list[Row], Cells]]
TABLES: dict[str, Table] = {
    "suspend": suspend,
    "stop_latency": stop_latency,
    "large_reply": large_reply,
    "round_memory": round_memory,
    "timeline": loop_tables.timeline,
    "timeline_paced": loop_tables.timeline_paced,
    "host_time": loop_tables.host_time,
    "costs": costs,
    "overhead": overhead,
    "agent_turns": partial(agent_tables.turns, preset="cpu"),
    "agent_turns_paced": partial(agent_tables.turns, preset="paced"),
    "agent_turns_paced_32b": partial(agent_tables.turns, preset="paced-32b"),
    "prompt_sharing": prompt_sharing,
    "kernels": kernels,
    "learning": learning,
    "int8_error": int8_error,
    "simulated": simulated,
    "projected": projected,
}
"""Tables by the name in the marker."""
