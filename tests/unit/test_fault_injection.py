"""An exception at any call between adapter and scheduler ends the server; nothing is lost or repeated (`fail-stop`).

Each call fails the first time that an epoch makes it; with `APRIL_LONG=1` also a later time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.crash_loop import forked
from tests.unit.fault_loop import FAILED, NO_FAULT, FaultClient, FaultLoop, failing_epoch
from tests.unit.fault_requests import read
from tests.unit.injected_faults import calls, faults

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200
"""Epochs that may pass without a call that is to fail."""


def test_calls_are_read_from_the_code() -> None:
    found = calls()
    assert {"engine.detach", "engine.record", "controller.progress", "controller.interrupt"} <= set(found)


def test_an_exception_at_any_call_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """The parent that forks is a process of its own, without the threads that a test run has."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.unit.test_fault_injection", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-8000:]


def inject_all(folder: Path) -> None:
    """Every epoch fails at another call, on the journal and the files that the ones before have left."""
    client, epoch, failed = FaultClient(), 0, set()
    for fault in faults(7, later="APRIL_LONG" in os.environ):
        print(f"{epoch} epochs, next fault: {fault}", flush=True)
        for _ in range(SEEDS if fault.nth == 1 else 1):
            epoch += 1
            _, status = forked(
                lambda pipe, f=fault, seed=epoch: failing_epoch(folder, pipe, seed, f, client.requests), client
            )
            assert status in (FAILED, NO_FAULT), f"{fault} in epoch {epoch}: exit status {status}"
            if status == FAILED:
                failed.add((fault.call, fault.when))
                break
    _, status = forked(lambda pipe: FaultLoop(folder, pipe, epoch + 1, client.requests).finish(), client)
    assert status == 0
    assert not list(client.undelivered())
    assert not client.open
    assert {one.rid for one in read(folder)} == client.requests
    assert not client.legs, "a trajectory is not delivered"
    assert len(client.left) > 50
    missed = {(call, when) for call in calls() for when in ("before", "after")} - failed
    assert not missed, f"no epoch made these calls: {sorted(missed)}"
    print(
        f"{epoch} epochs, {len(failed)} faults, {len(client.replies)} replies, {len(client.delivered)} samples, "
        f"{len(client.requests)} attached requests"
    )


if __name__ == "__main__":
    inject_all(Path(sys.argv[1]))
