"""What our plugin costs SGLang's own requests: `sglang.bench_serving` on the stock server and on ours.

    python -m bench.overhead --repetitions 5

Three cases in turn, round by round: stock; ours idle (the plugin is active, no round is open); ours with a round open
whose samples hold one slot, so that the round's bookkeeping runs in every step. Rows carry output tokens/s and the
ratio to the stock figure of the same repetition.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench import record
from bench.rollout.presets import PRESETS
from bench.rollout.servers import Size, both
from examples.tiny_model import make
from sglang_april.client import AprilClient

CASES = ("stock", "idle", "round open")
PROMPTS, INPUT, OUTPUT = 256, 32, 64
CONTEXT = 8192
OPEN_LIMIT_S = 60.0
ENDLESS = 32
"""So many samples of a whole context, one after the other, outlast any measurement."""


def serve(url: str, model: Path, prompts: int, slots: int) -> float:
    """Output tokens/s of one `sglang.bench_serving` run with random ids and fixed lengths."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        # fmt: off
        command = [
            sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url,
            "--dataset-name", "random-ids", "--num-prompts", str(prompts), "--random-input-len", str(INPUT),
            "--random-output-len", str(OUTPUT), "--random-range-ratio", "1.0", "--max-concurrency", str(slots),
            "--model", str(model), "--tokenizer", str(model), "--output-file", str(out), "--disable-tqdm",
        ]
        # fmt: on
        subprocess.run(command, check=True, capture_output=True, cwd=record.ROOT)
        return float(json.loads(out.read_text().splitlines()[-1])["output_throughput"])


@contextlib.contextmanager
def open_round(url: str, tokens: int) -> Iterator[None]:
    """A round that has one sample running at any time; it is stopped and dropped at the end."""
    run = f"overhead-{uuid.uuid4().hex[:8]}"
    endless = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    prompts = [{"id": str(i), "input_ids": [9, 10, 11], "sampling_params": endless} for i in range(ENDLESS)]
    with AprilClient(url) as client:
        events = client.stream(run=run, round_id=run, prompts=prompts, quota=None, concurrency=1)
        waiter = threading.Thread(target=lambda: list(events), daemon=True)
        waiter.start()
        deadline = time.monotonic() + OPEN_LIMIT_S
        while not _is_open(client, run):
            if time.monotonic() > deadline:
                raise RuntimeError("the round did not open")
            time.sleep(0.01)
        try:
            yield
            still = _is_open(client, run)
        finally:
            with contextlib.suppress(Exception):
                client.stop(run)
            client.drop(run)
        if not still:
            raise RuntimeError("the round ended before the measurement did: give its sample more tokens")


def _is_open(client: AprilClient, round_id: str) -> bool:
    return any(one["round_id"] == round_id for one in client.state()["rounds"])


def main(given: list[str] | None = None) -> int:
    """Appends three rows per repetition."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "overhead.json")
    args = parser.parse_args(given)
    plan = PRESETS["cpu"].plan
    facts = {"bench": "overhead", "run_id": uuid.uuid4().hex[:12], **record.facts()}
    with tempfile.TemporaryDirectory(prefix="april-bench-") as folder:
        model = make(Path(folder) / "v0")
        size = Size(model, plan.slots, CONTEXT, 140_000)
        with both(size, record.ROOT / "out" / "bench") as (stock, ours):
            for url in (stock, ours):
                serve(url, model, plan.slots, plan.slots)
            ratios: dict[str, list[float]] = {case: [] for case in CASES}
            for repetition in range(args.repetitions):
                rates = {"stock": serve(stock, model, args.prompts, plan.slots)}
                rates["idle"] = serve(ours, model, args.prompts, plan.slots)
                with open_round(ours, CONTEXT - 16):
                    rates["round open"] = serve(ours, model, args.prompts, plan.slots)
                for case, rate in rates.items():
                    ratio = rate / rates["stock"]
                    ratios[case].append(ratio)
                    row = {"case": case, "repetition": repetition, "output_tokens_per_s": rate, "ratio": ratio}
                    record.append_rows(args.out, [{**facts, **row}])
                    print(f"{case:<12} {rate:9.0f} tokens/s  {ratio:.3f}", flush=True)
    print("  ".join(f"{case}: {median(values):.3f}" for case, values in ratios.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
