"""`python -m sglang_april.top URL`: a live view of a server in the terminal, from `GET /april/state`.

Needs what the client needs, and neither SGLang nor torch.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang_april.client.calls import AprilError, with_scheme
from sglang_april.client.client import AprilClient

HEIGHTS = " ▁▂▃▄▅▆▇█"
BAR = 30
INTERRUPTED = 130
CLEAR = "\x1b[H\x1b[J"
ALTERNATE, NORMAL = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def main(argv: Sequence[str] | None = None) -> int:
    """Show frames until Ctrl-C (exit status 130), or one (`--once`)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's shell starts background jobs without it
    parser = argparse.ArgumentParser(prog="python -m sglang_april.top", description=__doc__.splitlines()[0])
    parser.add_argument("url", metavar="URL", help="base URL of the server, such as http://localhost:30000")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between frames (default: 1)")
    parser.add_argument("--api-key", default=os.environ.get("APRIL_API_KEY"), help="default: APRIL_API_KEY")
    options = parser.parse_args(argv)
    if options.interval <= 0:
        parser.error("--interval must be above 0")
    options.url = with_scheme(options.url)
    if not options.url.startswith(("http://", "https://")):
        parser.error(f"URL must begin with http:// or https://, not {options.url!r}")
    try:
        with AprilClient(options.url, options.api_key) as client:
            if options.once:
                print(frame(options.url, client.state(), [], shutil.get_terminal_size().columns), flush=True)  # noqa: T201
            else:
                _watch(client, options.url, options.interval)
    except AprilError as error:
        print(_sentence(options.url, error), file=sys.stderr)  # noqa: T201
        return 1
    except (LookupError, TypeError, ValueError, msgspec.DecodeError):
        print(f"{options.url}: this is not an sglang-april server", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _sentence(url: str, error: AprilError) -> str:
    if error.status == 200:
        return f"{url}: this is not an sglang-april server"
    reason = "the server requires its key: --api-key or APRIL_API_KEY" if error.status == 401 else error.reason
    return reason if url.rstrip("/") in reason else f"{url}: {reason}"


def _watch(client: AprilClient, url: str, interval: float) -> None:
    running: deque[int] = deque(maxlen=1000)
    state = client.state()  # the first answer must come; later the server may be unreachable for a while
    on_terminal = sys.stdout.isatty()
    sys.stdout.write(ALTERNATE if on_terminal else "")
    try:
        while True:
            running.append(state["samples"]["running"])
            size = shutil.get_terminal_size()
            lines = frame(url, state, running, size.columns).splitlines()
            _draw(lines[: size.lines - 1] if on_terminal else [*lines, ""], on_terminal)
            time.sleep(interval)
            try:
                state = client.state()
            except AprilError as error:
                _draw([_sentence(url, error), "trying again …"], on_terminal)
    finally:
        sys.stdout.write(NORMAL if on_terminal else "")
        sys.stdout.flush()


def _draw(lines: list[str], on_terminal: bool) -> None:
    sys.stdout.write((CLEAR if on_terminal else "") + "\n".join(lines) + "\n")
    sys.stdout.flush()


def frame(url: str, state: Mapping[str, Any], running: Sequence[int], width: int) -> str:
    """One frame as text, no line wider than `width`. `running`: running samples at the last polls."""
    refused = state["closed"] or ("paused" if state["frozen"] else "")
    lines = [
        f"{url}   policy version {state['policy_version']}   step {state['step']:,}"
        + ("   push open" if state["push_open"] else ""),
        *([f"no rounds: {refused}"] if refused else []),
        f"undelivered tokens {state['carry_tokens']:,} of {state['carry_cap_tokens']:,}   journal {_journal(state)}",
        "",
        f"batch      {sparkline(list(running)[-max(1, width - 24) :])} {state['samples']['running']} running",
        "",
        *_bars("samples", state["samples"]),
        *_bars("tier", state["tokens"], " KV tokens"),
        *_bars("staleness", state["staleness"], " groups"),
        "",
        *_table(
            "open round",
            ("run", "finished", "quota", "must finish"),
            [(r["round_id"], r["run"], r["counted"], r["quota"], len(r["mandatory"])) for r in state["rounds"]],
        ),
        "",
        *_agents(state),
        *_table(
            "last rounds",
            ("run", "ended by", "seconds", "groups", "samples", "tokens", "mean running", "samples by staleness"),
            [_ended(r) for r in state["http"]["last_rounds"]],
        ),
    ]
    return "\n".join(_printable(line)[:width].rstrip() for line in lines)


def _agents(state: Mapping[str, Any]) -> list[str]:
    """Lines on attached requests and trajectories, by run; empty if there are none."""
    attached, trajectories = state["attached"], state["trajectories"]
    rows = []
    for run in sorted(attached.keys() | trajectories.keys()):
        pending, active = attached.get(run, {}), trajectories.get(run, {})
        sizes = [pending.get(name, 0) for name in ("samples", "tokens")]
        rows.append((run, *sizes, *(active.get(name, 0) for name in ("undelivered", "done", "oldest_staleness"))))
    names = ("pending requests", "tokens", "trajectories", "of them done", "oldest staleness")
    return [*_table("agents of run", names, rows), ""] if rows else []


def sparkline(values: Sequence[float]) -> str:
    """One block character per value."""
    most = max(values, default=0) or 1
    return "".join(HEIGHTS[round(value / most * (len(HEIGHTS) - 1))] for value in values)


def _journal(state: Mapping[str, Any]) -> str:
    journal = state["journal"]
    if journal is None:
        return "none"
    if journal["fault"]:
        return f"FAULTY: {journal['fault']}"
    return f"ok, {journal['bytes'] / 2**20:.1f} MiB, {journal['waiting']} batches wait, {journal['lag_s']:.1f} s behind"


def _ended(r: Mapping[str, Any]) -> tuple[Any, ...]:
    ages = "  ".join(f"{age}: {samples}" for age, samples in r["samples_by_staleness"].items())
    fields = (r[name] for name in ("round_id", "run", "end_reason", "duration_s", "groups", "samples", "tokens"))
    return (*fields, r["mean_running"], ages)


def _bars(title: str, counts: Mapping[str, int], unit: str = "") -> list[str]:
    most = max(counts.values(), default=0) or 1
    names = (title, *[""] * len(counts))
    return [
        f"{head:10} {name:>10} {'█' * round(BAR * count / most):{BAR}} {count:,}{unit}"
        for head, (name, count) in zip(names, counts.items(), strict=False)
    ]


def _table(first: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[first, *names], *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names) + 1)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)[:36]


def _printable(text: str) -> str:
    """Names come from clients, and must not move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


if __name__ == "__main__":
    sys.exit(main())
