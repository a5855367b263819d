"""Ranks that differ at the start do not serve; a rank that decides differently ends the server with one sentence."""

import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.integration.conftest import Pool
from tests.support.live import until
from tests.support.server import Server
from tests.support.workload import prompt

pytestmark = pytest.mark.ends_server
PROMPTS = [prompt(f"p{i}", 8, ids=4) for i in range(3)]


@pytest.fixture
def two_ranks(pool: Pool) -> Iterator[Server]:
    """A server with two ranks for one test: it ends."""
    server = pool.get("tp2-differ", ["--tp-size=2", "--max-total-tokens=4000"], "llama", forked=True)
    yield server
    server.stop()


@pytest.fixture
def started_with(pool: Pool) -> Iterator[Callable[[str], Server]]:
    """A server of two ranks whose fault is active while it starts."""
    servers = []

    def start(fault: str) -> Server:
        folder = pool.folder / "tp2-start"
        folder.mkdir(exist_ok=True)
        (folder / "fault").write_text(fault)
        servers.append(pool.get("tp2-start", ["--tp-size=2", "--max-total-tokens=4000"], "llama", forked=True))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_ranks_with_different_flags_do_not_start(started_with: Callable[[str], Server], pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="server tp2-start did not come up"):
        started_with("other flag")
    log = (pool.folder / "tp2-start" / "tp2-start.log").read_text(errors="replace")
    sentence = "sglang-april: all TP ranks must agree on --april-quota, but rank 1 has 5 and rank 0 has 4."
    assert log.count(sentence) == 2, "each rank reports it"


def test_smallest_budget_of_all_ranks_counts(started_with: Callable[[str], Server]) -> None:
    """Rank 1 has little memory: rank 0 stores no more than it."""
    assert started_with("little memory").state()["store"]["cap_tokens"]["host"] == 320


def difference(server: Server) -> re.Match[str] | None:
    return re.search(
        r"TP ranks decided differently at step (\d+): rank (\d) decided (.*?); rank (\d) decided (.*?)(?:['\"]|\.$)",
        server.log.read_text(errors="replace"),
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    ("fault", "decided"),
    [
        ("other order", "start p2[0] p1[0] p0[0]"),
        ("fewer started", "start p0[0] p1[0]"),
        ("none started", "nothing"),
    ],
)
def test_different_decision_of_one_rank_ends_the_server(two_ranks: Server, run: str, fault: str, decided: str) -> None:
    """Batches of equal shape would give wrong tokens; others would leave the ranks in a collective."""
    two_ranks.rollout(run=run, prompts=PROMPTS, quota=None)
    assert difference(two_ranks) is None
    with two_ranks.fault(fault), pytest.raises(httpx.HTTPError):
        two_ranks.rollout(run=run, prompts=PROMPTS, quota=None)
    until(lambda: not two_ranks.alive, "the server ends")
    found = difference(two_ranks)
    assert found is not None
    reported = {int(found[2]): found[3], int(found[4]): found[5]}
    assert reported == {0: "start p0[0] p1[0] p2[0]", 1: decided}


def test_without_the_comparison_wrong_tokens_are_delivered(
    two_ranks: Server, run: str, record_property: Callable[[str, object], None]
) -> None:
    """The guard removed: each rank computes its half of another sample, and the round is answered."""
    right = two_ranks.rollout(run=run, prompts=PROMPTS, quota=None)["finished"]
    two_ranks.remove_guard("decisions compared")
    with two_ranks.fault("other order"):
        wrong = two_ranks.rollout(run=run, prompts=PROMPTS, quota=None)["finished"]
    assert [g["samples"] for g in wrong] != [g["samples"] for g in right]
    assert two_ranks.alive
    assert difference(two_ranks) is None
    record_property("guard", "decisions compared")
