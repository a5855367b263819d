"""Restarts with a disk tier: KV of exactly the journal's tokens is restored, on all ranks or on none."""

import random
from pathlib import Path
from typing import Any

import pytest

from sglang_april.recovery.kv_recovery import Outcome, combine_outcomes
from sglang_april.scheduler import report
from tests.unit.controller_harness import lengths
from tests.unit.crashing_harness import CrashingHarness
from tests.unit.test_pressure import tiers

FAULTS = ("flip", "remove")
STORIES, EVENTS = 40, 40


@pytest.fixture
def harness(tmp_path: Path) -> CrashingHarness:
    return CrashingHarness(tmp_path / "j", replicas=2, disk_cap=1000)


def suspended_to_disk(harness: CrashingHarness, *sizes: int) -> None:
    """A round of samples of these lengths, ended by one that is short; the others' files are written."""
    harness.open("run", lengths(2, *sizes), quota=1, tier="disk")
    harness.reply()
    harness.step(2)
    assert set(tiers(harness, "run").values()) == {"disk"}


def damage(harness: CrashingHarness, rank: int, number: int, fault: str) -> None:
    """Damage or delete one file of one rank, if it has that many."""
    files = harness.folders[rank].files
    for key in sorted(files)[number : number + 1]:
        if fault == "flip":
            files[key].sound = False
        else:
            del files[key]


def rest(harness: CrashingHarness) -> dict[str, Any]:
    """Stats of a round that finishes what is left."""
    if harness.controller.context.clock.closed:
        harness.push_begin(harness.version)
        harness.push_end()
    harness.open("run", {}, quota=None)
    return harness.reply().stats


def test_partials_resume_on_kv_of_the_previous_server(harness: CrashingHarness) -> None:
    """Nothing is prefilled again, and with the same policy nothing shows in the spans."""
    suspended_to_disk(harness, 30, 40)
    harness.crash()
    assert tiers(harness, "run") == {"p1": "disk", "p2": "disk"}
    assert harness.controller.tiers.used["disk"] == sum(
        s.kv.pages.copy.cost for s in harness.ledger.runs["run"].suspended if s.kv.pages and s.kv.pages.copy
    )
    stats = rest(harness)
    assert (stats["resumed_kept"], stats["resumed_recomputed"], stats["reprefilled_tokens"]) == (2, 0, 0)
    assert all(len(s.spans) == 1 for s in harness.samples.values())
    harness.step(2)
    assert not any(folder.files for folder in harness.folders)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_kv_of_an_older_policy_keeps_its_version(harness: CrashingHarness, kv: str) -> None:
    """`kept` under whichever version is named later; `recompute` prefills it again."""
    suspended_to_disk(harness, 30)
    harness.push_begin()
    harness.push_end(3)
    harness.crash()
    harness.push_begin(3)
    harness.push_end()
    harness.open("run", {}, quota=None, kv=kv)
    stats = harness.reply().stats
    assert (stats["resumed_kept"], stats["resumed_recomputed"]) == ((1, 0) if kv == "keep" else (0, 1))
    (sample,) = (s for (key, _), s in harness.samples.items() if key[1] == "p1")
    assert [(s.version, s.kv) for s in sample.spans] == [(0, "fresh"), (3, "kept" if kv == "keep" else "recomputed")]


def test_staleness_bound_applies_across_a_restart(harness: CrashingHarness) -> None:
    """What is too old must finish in its first round, on its kept KV."""
    suspended_to_disk(harness, 30)
    harness.push_begin()
    harness.push_end(2)
    harness.crash()
    harness.push_begin(2)
    harness.push_end()
    harness.open("run", {"new": (3, 1, -2)}, quota=1, max_staleness=2)
    reply = harness.reply()
    assert reply.deliver[0].id == "p1"
    assert reply.stats["resumed_kept"] == 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_file_missing_on_one_rank_is_used_on_none(harness: CrashingHarness, rank: int, fault: str) -> None:
    """Both decide alike; damage is counted and reported, a file that was not written yet is not."""
    suspended_to_disk(harness, 30, 40)
    damage(harness, rank, 0, fault)
    harness.crash()
    assert tiers(harness, "run") == {"p1": "none", "p2": "disk"}
    stored = report.store(harness.controller.context, harness.controller.tiers)
    assert stored["lost"] == (fault == "flip")
    assert (f"rank {rank}: " in stored["last_failure"]) == (fault == "flip")
    assert all(len(folder.files) == 1 for folder in harness.folders), "unused files are removed everywhere"
    stats = rest(harness)
    assert (stats["resumed_kept"], stats["resumed_recomputed"], stats["kv_lost"]) == (1, 1, int(fault == "flip"))


def test_reopened_round_reports_damaged_kv(harness: CrashingHarness) -> None:
    suspended_to_disk(harness, 30)
    harness.open("run", {}, quota=None)
    damage(harness, 1, 0, "flip")
    harness.crash()
    stats = harness.reply().stats
    assert stats["kv_lost"] == 1
    assert any("rank 1: OSError: flipped" in warning for warning in stats["warnings"])


def test_an_older_file_is_not_used(tmp_path: Path) -> None:
    """The sample had continued, and its file had not been removed when the server died."""
    harness = CrashingHarness(tmp_path / "j", replicas=2, disk_cap=1000, copy_delay=40)
    harness.open("run", lengths(2, 30), quota=1, tier="disk")
    harness.reply()
    harness.step(50)
    harness.open("run", {"p2": (3, 1, -5)}, quota=1, tier="none")
    harness.reply()
    assert all(folder.files for folder in harness.folders)
    harness.crash()
    assert tiers(harness, "run") == {"p1": "none"}
    assert report.store(harness.controller.context, harness.controller.tiers)["lost"] == 0
    assert not any(folder.files for folder in harness.folders)


def test_epoch_without_the_disk_tier_invalidates_its_files(harness: CrashingHarness) -> None:
    """They may belong to another history of the same samples: as many tokens, drawn again."""
    suspended_to_disk(harness, 30)
    harness.crash(disk=False)
    assert all(folder.files for folder in harness.folders)
    harness.crash()
    assert tiers(harness, "run") == {"p1": "none"}
    assert not any(folder.files for folder in harness.folders)


def test_a_smaller_budget_keeps_the_longest(harness: CrashingHarness) -> None:
    """Placement follows the eviction order: the least recompute time per byte is evicted first."""
    harness.open("run", {"end": (3, 1, -2), "long": (9, 1, -30), "short": (3, 1, -30)}, quota=1, tier="disk")
    harness.reply()
    harness.step(2)
    pages = harness.sample("run", "long").kv.pages
    assert pages is not None
    harness.disk_cap = pages.length
    harness.crash()
    assert tiers(harness, "run") == {"long": "disk", "short": "none"}
    harness.step()
    assert all(len(folder.files) == 1 for folder in harness.folders)


@pytest.mark.parametrize(
    ("reported", "together"),
    [
        ([["", "", None, "x"]], ["", "", None, "x"]),
        ([["", "", None], ["", None, "x"]], ["", None, "rank 1: x"]),
        ([["y", ""], ["x", ""]], ["rank 0: y", ""]),
        ([[], []], []),
    ],
)
def test_combined_outcome_is_the_worst_of_all_ranks(reported: list[list[Outcome]], together: list[Outcome]) -> None:
    assert combine_outcomes(reported) == together


class RestartLoop:
    """A random story: put, promote, demote, evict, resume, drop, crash, reopen."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.harness = CrashingHarness(
            path,
            replicas=2,
            slots=4,
            overlap=rng.random() < 0.5,
            disk_cap=rng.choice((40, 1000)),
            host_cap=rng.choice((0, 40)),
            copy_delay=rng.choice((0, 1, 4)),
        )
        self.prompts = 0

    def emit(self, events: int) -> None:
        acts = [self.round, self.round, self.round, self.push, self.drop, self.crash]
        for _ in range(events):
            self.rng.choice(acts)()
        self.harness.drain()
        self.harness.close()

    def round(self) -> None:
        """Some new samples and the old ones; mostly it ends when it has run for a while, sometimes it stays open."""
        harness, rng = self.harness, self.rng
        if harness.controller.context.clock.closed:
            self.push(0)
        count = rng.randint(0, 3)
        prompts = {f"p{self.prompts + i}": (rng.randint(1, 9), 1, -rng.choice((12, 25))) for i in range(count)}
        self.prompts += count
        if "run" not in harness.rounds:
            tier, kv = rng.choice(("disk", "disk", "host", "auto")), rng.choice(("keep", "keep", "recompute"))
            harness.open("run", prompts, quota=None, tier=tier, kv=kv)
        harness.step(rng.randint(0, 8))
        if rng.random() < 0.8:
            harness.stop("run")
            harness.step(rng.randint(0, 6))

    def push(self, ahead: int | None = None) -> None:
        ahead = self.rng.randint(0, 2) if ahead is None else ahead
        assert self.harness.push_begin() == 200
        assert self.harness.push_end(self.harness.version + ahead if ahead else None) == 200

    def drop(self) -> None:
        if names := sorted(key[1] for key in self.harness.groups):
            self.harness.drop("run", [self.rng.choice(names)])

    def crash(self) -> None:
        """The stores of the ranks may have progressed differently; files may be damaged or deleted."""
        for engine in self.harness.engines:
            engine.copies.carry_out_first(self.rng.choice((0, 0, 1, 3)))
        if self.rng.random() < 0.3:
            damage(self.harness, self.rng.randint(0, 1), self.rng.randint(0, 2), self.rng.choice(FAULTS))
        self.harness.crash(disk=self.rng.random() < 0.8)


def test_any_sequence_of_epochs_with_a_disk_tier(tmp_path: Path) -> None:
    """After every crash: KV of other tokens is never used, and what is sound on all ranks is used."""
    recovered = crashes = 0
    for seed in range(STORIES):
        loop = RestartLoop(tmp_path / str(seed), seed)
        loop.emit(EVENTS)
        recovered += loop.harness.recovered
        crashes += loop.harness.crashes
    print(f"{crashes} crashes, {recovered} partials had their KV again")
    assert recovered > STORIES
