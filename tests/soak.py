"""`make soak`: kill −9 the live server a hundred times in total, over any number of invocations.

Each scenario (tests/support/kills.py) starts a server with an empty journal, kills it a few times and checks everything
at its end. Totals are kept in a file, so that an interrupted soak can continue; an interrupted scenario does not count.
Servers are forks of one process that has imported SGLang (tests/support/fork_server.py), which saves most of the start
time.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from examples.tiny_model import make
from tests.support.fork_server import ForkServer
from tests.support.kills import KillScenario
from tests.support.server import Server

FLAGS = ["--disable-overlap-schedule", "--max-total-tokens=16000"]
OVERLAP = ["--max-total-tokens=16000"]


def run_scenario(folder: Path, seed: int, kills: int, fork_server: ForkServer) -> dict[str, int]:
    """Run one scenario in its own folder and return its totals."""

    def model(which: int) -> Path:
        path = folder / f"model-{which}"
        return path if path.exists() else Path(make(path, dtype="float32", seed=which))

    rng = random.Random(seed)
    loop = rng.choice((FLAGS, OVERLAP))
    flags = [*loop, f"--april-journal={folder / 'journal'}", f"--april-journal-sync={rng.choice(('normal', 'full'))}"]
    flags.append(f"--april-journal-interval={rng.choice((16, 256))}")
    (folder / "disk").mkdir()
    flags += [f"--april-disk-dir={folder / 'disk'}", "--april-disk-gb=1"]
    server = Server("soak", model(0), flags, folder, fork_server=fork_server)
    try:
        server.spawn()
        server.wait()
        scenario = KillScenario(server, model, seed)
        scenario.run(kills)
    finally:
        server.stop()
    assert scenario.kills == kills
    assert not scenario.warnings
    return {
        "scenarios": 1,
        "kills": scenario.kills,
        "rounds": sum(map(len, scenario.rounds.values())),
        "groups": len(scenario.groups),
        "tokens": sum(len(s["output_ids"]) for g in scenario.groups for s in g["samples"]),
        "replies_asked_again": scenario.replayed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="total, including earlier invocations")
    parser.add_argument("--each", type=int, default=10, help="kills per scenario")
    parser.add_argument("--state", type=Path, default=Path("out/soak.json"))
    options = parser.parse_args()
    totals: dict[str, int] = json.loads(options.state.read_text()) if options.state.exists() else {}
    fork_server = ForkServer()
    while (left := options.kills - totals.get("kills", 0)) > 0:
        with tempfile.TemporaryDirectory() as folder:
            began, seed = time.monotonic(), totals.get("scenarios", 0)
            totals_of_one = run_scenario(Path(folder), seed, min(left, options.each), fork_server)
            for name, count in {**totals_of_one, "seconds": round(time.monotonic() - began)}.items():
                totals[name] = totals.get(name, 0) + count
        options.state.parent.mkdir(parents=True, exist_ok=True)
        options.state.write_text(json.dumps(totals, indent=1) + "\n")
        print(json.dumps(totals), flush=True)
    fork_server.close()


if __name__ == "__main__":
    main()
