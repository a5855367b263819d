"""Two ranks are killed and restart with one journal and the files of each rank."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Pool
from tests.integration.test_tp2 import decided_alike
from tests.support.compare import by_key
from tests.support.kills import TIMEOUT_S, KillScenario
from tests.support.live import LiveServer, live_server, until
from tests.support.workload import prompt

PARAMS = {"temperature": 0.8}
LENGTH = 60


@pytest.fixture
def journalled(pool: Pool, models: Callable[[str, int], Path], tmp_path: Path) -> Iterator[LiveServer]:
    """A server with two ranks, a journal and a disk tier that no other test shares."""
    flags = ["--tp-size=2", "--max-total-tokens=4000", f"--april-journal={tmp_path / 'journal'}"]
    server = pool.get("tp2-journal", flags, "llama", {"SGLANG_APRIL_DIGEST": str(tmp_path)}, forked=True)
    with live_server(server, lambda seed: models("llama", seed)) as live:
        yield live
    server.stop()


def test_two_ranks_recover_their_files_after_a_kill_and_deliver_everything_once(
    journalled: LiveServer, run: str
) -> None:
    """A file that only rank 1 has lost, and one that is damaged there alone, are recomputed by both ranks."""
    server, live = journalled.server, journalled
    requested = [*(prompt(f"p{i}", LENGTH, n=2, **PARAMS) for i in range(4)), prompt("short", 12, **PARAMS)]
    groups = server.rollout(run=run, prompts=requested, quota=1, tier="disk")["finished"]
    until(lambda: not server.state()["store"]["in_flight"], "all files are written")
    before = {(p["id"], 0, p["index"]): p["tokens"] for p in server.partials(run)}
    assert {p["tier"] for p in server.partials(run)} == {"disk"}
    assert len(before) == 2 * 4

    open_round = {"run": f"{run}-open", "round_id": f"{run}-open", "prompts": [prompt("open", 400, n=3, **PARAMS)]}
    scenario = KillScenario(server, live.model, seed=0)
    with scenario.in_background(
        lambda: scenario.call("POST", "/april/rollout", {**open_round, "quota": None})
    ) as reply:
        until(lambda: reply.done() or server.state()["samples"]["running"] == 3, "the round runs")
        scenario.restart(meanwhile=lambda: spoil_two_files_of_rank_1(server.folder / "disk"))
        assert {(p["id"], 0, p["index"]): p["tokens"] for p in server.partials(run)} == before
        tiers = [p["tier"] for p in server.partials(run)]
        assert (tiers.count("none"), tiers.count("disk")) == (2, len(before) - 2)
        store = server.state()["store"]
        assert (store["lost"], "rank 1: " in store["last_failure"], "damaged" in store["last_failure"]) == (
            1,
            True,
            True,
        )
        version = live.push(1)
        scenario.up.set()
        opened = reply.result(TIMEOUT_S).json()["finished"]
    last = server.rollout(run=run, prompts=[], quota=None, kv="keep")
    stats = last["stats"]
    assert (stats["resumed_kept"], stats["resumed_recomputed"]) == (len(before) - 2, 2)
    kinds = [s["spans"][-1] for s in by_key(last["finished"]).values()]
    assert {span["version"] for span in kinds} == {version}
    assert sorted(span["kv"] for span in kinds) == ["kept"] * (len(before) - 2) + ["recomputed"] * 2

    delivered = by_key(groups + last["finished"])
    assert delivered.keys() == {*before, ("short", 0, 0)}
    assert by_key(opened).keys() == {("open", 0, i) for i in range(3)}
    assert server.state()["samples"] == dict.fromkeys(server.state()["samples"], 0)
    assert server.http.get("/april/check").json() == {"ok": True, "problem": ""}
    live.check(groups + last["finished"] + opened, {"open": PARAMS, **{p["id"]: PARAMS for p in requested}})
    decided_alike(live)


def spoil_two_files_of_rank_1(folder: Path) -> None:
    """One is gone, one has a flipped byte in the middle; rank 0 has both."""
    gone, damaged, *_ = sorted(folder.glob("*.r1.kv"))
    gone.unlink()
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
