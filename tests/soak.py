"""`make soak`: kills −9 of the live server until there have been a hundred, over any number of runs of this command.

Each story (tests/support/kills.py) starts a server with an empty journal, kills it a few times and checks everything
at its end. Totals are kept in a file, to which an interrupted soak comes back; a story that was cut off does not count.
Servers are forks of one process that has imported SGLang (tests/support/fork_server.py): importing it took most of the
minute that a kill cost.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from examples.tiny_model import make
from tests.support.fork_server import ForkServer
from tests.support.kills import Story
from tests.support.server import Server

FLAGS = ["--disable-overlap-schedule", "--max-total-tokens=16000"]
OVERLAP = ["--max-total-tokens=16000"]


def story(folder: Path, seed: int, kills: int, warm: ForkServer) -> dict[str, int]:
    """One story in a folder of its own; its totals."""

    def model(which: int) -> Path:
        path = folder / f"model-{which}"
        return path if path.exists() else Path(make(path, dtype="float32", seed=which))

    rng = random.Random(seed)
    loop = rng.choice((FLAGS, OVERLAP))
    flags = [*loop, f"--april-journal={folder / 'journal'}", f"--april-journal-sync={rng.choice(('normal', 'full'))}"]
    (folder / "disk").mkdir()
    flags += [f"--april-disk-dir={folder / 'disk'}", "--april-disk-gb=1"]
    server = Server("soak", model(0), flags, folder, warm=warm)
    try:
        server.spawn()
        server.wait()
        told = Story(server, model, seed)
        told.tell(kills)
    finally:
        server.stop()
    assert told.kills == kills
    assert not told.warnings
    return {
        "stories": 1,
        "kills": told.kills,
        "rounds": sum(map(len, told.rounds.values())),
        "groups": len(told.groups),
        "tokens": sum(len(s["output_ids"]) for g in told.groups for s in g["samples"]),
        "replies_asked_again": told.replayed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="in all, those of earlier runs included")
    parser.add_argument("--each", type=int, default=10, help="kills of a story")
    parser.add_argument("--state", type=Path, default=Path("out/soak.json"))
    options = parser.parse_args()
    totals: dict[str, int] = json.loads(options.state.read_text()) if options.state.exists() else {}
    warm = ForkServer()
    while (left := options.kills - totals.get("kills", 0)) > 0:
        with tempfile.TemporaryDirectory() as folder:
            began, seed = time.monotonic(), totals.get("stories", 0)
            told = story(Path(folder), seed, min(left, options.each), warm)
            for name, count in {**told, "seconds": round(time.monotonic() - began)}.items():
                totals[name] = totals.get(name, 0) + count
        options.state.parent.mkdir(parents=True, exist_ok=True)
        options.state.write_text(json.dumps(totals, indent=1) + "\n")
        print(json.dumps(totals), flush=True)
    warm.close()


if __name__ == "__main__":
    main()
