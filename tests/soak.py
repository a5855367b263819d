"""`make soak`: kills, hostile clients, stopped ranks, a full disk and failing copies, for hours if requested.

Each scenario (tests/support/kills.py) starts a server with an empty journal, with one rank or two; two trainers roll
out and push, and the server is ended again and again, mostly with kill -9, sometimes with SIGTERM. In between a
disturbance happens: hostile calls of SGLang's routes (tests/support/neighbours.py), SIGSTOP of one rank, a fault of one
rank's copies (tests/support/faults.py), or, where this process may mount a small file system, a disk without space for
journal and KV. At the end of a scenario everything must have been delivered once, with exact tokens. Totals
are kept in a file, so that an interrupted soak can continue; an interrupted scenario does not count. Servers are forks
of one process that has imported SGLang (tests/support/fork_server.py), which saves most of the start time.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from examples import interrupt
from examples.tiny_model import make
from tests.support.faults import COPY_FAULTS
from tests.support.fork_server import ForkServer
from tests.support.kills import KillScenario
from tests.support.neighbours import CALLS, Neighbour
from tests.support.server import Server

POOL = "--max-total-tokens=16000"
HARMLESS = ("generate", "chat", "completions", "abort", "pause", "unpause", "flush", "april", "read")
"""Calls of neighbours that change no weights: the policy of each version stays known."""


@dataclass
class Disturbances:
    """What happens between two kills."""

    server: Server
    ranks: int
    disk: Path | None
    """The small file system of journal and disk tier."""
    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, rng: random.Random) -> None:
        kinds = ["none", "neighbours", "stopped_ranks"]
        kinds += ["faults"] if self.ranks > 1 else []
        kinds += ["full_disk"] if self.disk else []
        kind = rng.choice(kinds)
        if kind != "none":
            getattr(self, kind)(rng)
            self.counts[kind] += 1

    def neighbours(self, rng: random.Random) -> None:
        """Twenty hostile calls; a pause that they leave is ended."""
        kinds = rng.choices(HARMLESS, [CALLS[kind] for kind in HARMLESS], k=20)
        with contextlib.suppress(httpx.TransportError):
            neighbour = Neighbour(self.server, self.server.model, f"neighbour-{rng.randrange(2**30)}")
            neighbour.run([(kind, rng.randrange(2**30)) for kind in kinds])
        self.server.http.post("/continue_generation", json={})

    def stopped_ranks(self, rng: random.Random) -> None:
        """One scheduler process stops for a while; the others wait for it in their next collective."""
        assert self.server.process is not None
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        schedulers = [child for child in children if "sglang::scheduler" in " ".join(child.cmdline()) + child.name()]
        process = rng.choice(schedulers or children)
        process.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.1, 3.0))
        process.send_signal(signal.SIGCONT)

    def full_disk(self, rng: random.Random) -> None:
        """Nothing can be written for a while."""
        assert self.disk is not None
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        time.sleep(rng.uniform(0.2, 3.0))
        filler.unlink()

    def faults(self, rng: random.Random) -> None:
        """Copies of rank 1 fail, are damaged or hang for a while."""
        with self.server.fault(rng.choice(sorted(COPY_FAULTS))):
            time.sleep(rng.uniform(0.2, 2.0))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a file system of 512 MiB; None if this process may not."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_scenario(folder: Path, seed: int, kills: int, fork_server: ForkServer) -> dict[str, int]:
    """Run one scenario in its own folder and return its totals."""
    with small_disk(folder / "small") as disk:
        return _run_scenario(folder, disk, seed, kills, fork_server)


def _run_scenario(folder: Path, disk: Path | None, seed: int, kills: int, fork_server: ForkServer) -> dict[str, int]:
    stored = disk or folder
    rng = random.Random(seed)
    ranks = 2 if seed % 3 == 2 else 1
    family = "llama" if ranks == 2 else "qwen3"

    def model(which: int) -> Path:
        path = folder / f"model-{which}"
        return path if path.exists() else Path(make(path, family=family, dtype="float32", seed=which))

    flags = [POOL, f"--tp-size={ranks}", *(["--disable-overlap-schedule"] if rng.random() < 0.5 else [])]
    flags += [f"--april-journal={stored / 'journal'}", f"--april-journal-sync={rng.choice(('normal', 'full'))}"]
    flags.append(f"--april-journal-interval={rng.choice((16, 256))}")
    (stored / "disk").mkdir()
    flags += [f"--april-disk-dir={stored / 'disk'}", "--april-disk-gb=1"]
    server = Server("soak", model(0), flags, folder, fork_server=fork_server)
    disturbances = Disturbances(server, ranks, disk)
    try:
        server.spawn()
        server.wait()
        scenario = KillScenario(server, model, seed, disturb=disturbances, sigterm_share=0.2)
        scenario.run(kills)
    finally:
        server.stop()
    assert scenario.kills == kills
    assert not scenario.warnings
    return {
        "scenarios": 1,
        "scenarios_of_two_ranks": int(ranks == 2),
        "kills": scenario.kills,
        "of_them_by_sigterm": scenario.terminations,
        "rounds": sum(map(len, scenario.rounds.values())),
        "groups": len(scenario.groups),
        "tokens": sum(len(s["output_ids"]) for g in scenario.groups for s in g["samples"]),
        "replies_asked_again": scenario.replayed,
        **disturbances.counts,
    }


def main() -> int:
    """Run scenarios until the totals are reached; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="total, including earlier invocations (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="at least so long, also a total, however many kills that takes"
    )
    parser.add_argument("--each", type=int, default=10, help="kills per scenario (%(default)s)")
    parser.add_argument("--state", type=Path, default=Path("out/soak.json"), help="totals (%(default)s)")
    options = parser.parse_args()
    totals: dict[str, int] = json.loads(options.state.read_text()) if options.state.exists() else {}
    fork_server = ForkServer()
    while totals.get("kills", 0) < options.kills or totals.get("seconds", 0) < 60 * options.minutes:
        began, seed = time.monotonic(), totals.get("scenarios", 0)
        folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
        try:
            totals_of_one = run_scenario(folder, seed, options.each, fork_server)
        except Exception:
            print(f"scenario {seed} failed; its server's log is in {folder}", flush=True)
            raise
        shutil.rmtree(folder)
        for name, count in {**totals_of_one, "seconds": round(time.monotonic() - began)}.items():
            totals[name] = totals.get(name, 0) + count
        options.state.parent.mkdir(parents=True, exist_ok=True)
        options.state.write_text(json.dumps(totals, indent=1) + "\n")
        print(json.dumps(totals), flush=True)
    fork_server.close()
    return 0


if __name__ == "__main__":
    interrupt.run(main, "totals of complete scenarios are kept; the same command continues")
