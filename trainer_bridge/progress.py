"""Progress output of a run: a console line and a JSONL row per step, TensorBoard events, evaluations."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch.utils.tensorboard import SummaryWriter

from trainer_bridge.checkpoints import LoopState, write_atomically

CHARTS = (
    "reward",
    "loss",
    "grad_norm",
    "off_policy_share",
    "hybrid_share",
    "staleness",
    "delivered_tokens_per_s",
    "mean_running",
    "masked",
    "rejected",
    "unscored",
)


class RunProgress:
    """Writes `steps.jsonl` and `evaluations.jsonl` in a run's folder. A repeated step replaces its row."""

    def __init__(self, folder: Path, console: Console | None = None, label: str = "") -> None:
        """`label`: begins each line on the console, where several runs print."""
        folder.mkdir(parents=True, exist_ok=True)
        self._steps, self._evaluations = folder / "steps.jsonl", folder / "evaluations.jsonl"
        self._console, self._label = console or Console(), label
        self._events = SummaryWriter(str(folder / "events"))
        self.evaluated_steps: set[int] = set()
        """Steps whose evaluation has been written."""

    def resume(self, step: int) -> None:
        """Delete the rows after this step, which is repeated from its checkpoint."""
        for path in (self._steps, self._evaluations):
            kept = [row for row in read_rows(path) if row["step"] <= step]
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.evaluated_steps = {row["step"] for row in read_rows(self._evaluations)}
        if step:
            self._print(f"resuming after step {step}")

    def step(self, row: dict[str, Any]) -> None:
        """Write the row of a step."""
        _append(self._steps, row)
        for name in CHARTS:
            if row.get(name) is not None:
                self._events.add_scalar(name, row[name], row["step"])
        for name, seconds in row["seconds"].items():
            self._events.add_scalar(f"seconds/{name}", seconds, row["step"])
        if row["lengths"]:
            self._events.add_scalar("length/mean", sum(row["lengths"]) / len(row["lengths"]), row["step"])
        self._print(step_line(row))
        for warning in row.get("warnings", []):
            self.warn(warning)
        for problem in row["problems"][:1]:
            self.warn(f"no reward: {problem}")

    def evaluated(self, state: LoopState, metrics: dict[str, float]) -> None:
        """Write the metrics of the evaluation after this step."""
        row = {"step": state.step, "samples_so_far": state.samples, "seconds_so_far": state.seconds, **metrics}
        _append(self._evaluations, row)
        self.evaluated_steps.add(state.step)
        self._events.add_scalar("eval/reward", metrics["reward"], state.step)
        self._print(
            f"step {state.step:4d}  held-out reward {metrics['reward']:.4f} ± {metrics['reward_se']:.4f} "
            f"({metrics['prompts']:g} prompts)"
        )

    def note(self, text: str) -> None:
        """Print a progress line, for example while the run waits for a server."""
        self._print(f"[dim]  {escape(text)}")

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._print(f"[yellow]  {escape(text)}")

    def _print(self, text: str) -> None:
        self._console.print(f"{self._label}{text}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Flush the TensorBoard events."""
        self._events.close()


def step_line(row: dict[str, Any]) -> str:
    """The console line of a step."""
    lengths = sorted(row["lengths"]) or [0]
    reward = "  none" if row["reward"] is None else f"{row['reward']:6.3f}"
    rate = "–" if row["delivered_tokens_per_s"] is None else f"{row['delivered_tokens_per_s']:,.0f}"
    seconds = " ".join(f"{phase} {duration:.1f}" for phase, duration in row["seconds"].items() if duration >= 0.05)
    name = "drain" if row.get("drain") else "step"
    turns = max(row["turns"], default=1)
    agent = f"turns {sum(row['turns']) / len(row['turns']):.1f}/{turns}  " if turns > 1 else ""
    return (
        f"{name} {row['step']:4d}  reward {reward}  {agent}length {lengths[len(lengths) // 2]}/{lengths[-1]}  "
        f"{rate:>7} tok/s  stale {row['off_policy_share']:4.0%} (≤ {row['staleness']})  "
        f"batch {row['mean_running']:.0f}  s: {seconds}"
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file, without a last line that is incomplete because the process was killed."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines(keepends=True) if text.endswith("\n")]


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")
