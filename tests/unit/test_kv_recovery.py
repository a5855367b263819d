"""Restarts with a disk tier: KV comes back of just the tokens that the journal has, on all ranks or on none."""

import random
from pathlib import Path
from typing import Any

import pytest

from sglang_april.recovery.kv_recovery import Outcome, combine_outcomes
from tests.unit.controller_harness import lengths
from tests.unit.crashing_harness import CrashingHarness
from tests.unit.test_pressure import tiers

FAULTS = ("flip", "remove")
STORIES, EVENTS = 40, 40


@pytest.fixture
def world(tmp_path: Path) -> CrashingHarness:
    return CrashingHarness(tmp_path / "j", replicas=2, disk_cap=1000)


def suspended_to_disk(world: CrashingHarness, *sizes: int) -> None:
    """A round of samples of these lengths, ended by one that is short; the others' files are written."""
    world.open("run", lengths(2, *sizes), quota=1, tier="disk")
    world.reply()
    world.step(2)
    assert set(tiers(world, "run").values()) == {"disk"}


def damage(world: CrashingHarness, rank: int, number: int, fault: str) -> None:
    """Something happens to one file of one rank, if there are so many."""
    files = world.folders[rank].files
    for key in sorted(files)[number : number + 1]:
        if fault == "flip":
            files[key].sound = False
        else:
            del files[key]


def rest(world: CrashingHarness) -> dict[str, Any]:
    """Stats of a round that finishes what is left."""
    if world.controller.context.clock.closed:
        world.push_begin(world.version)
        world.push_end()
    world.open("run", {}, quota=None)
    return world.reply().stats


def test_partials_resume_on_the_kv_of_the_server_before(world: CrashingHarness) -> None:
    """Nothing is prefilled again, and with the same policy nothing shows in the spans."""
    suspended_to_disk(world, 30, 40)
    world.crash()
    assert tiers(world, "run") == {"p1": "disk", "p2": "disk"}
    assert world.controller.tiers.used["disk"] == sum(
        s.kv.pages.copy.cost for s in world.ledger.runs["run"].suspended if s.kv.pages and s.kv.pages.copy
    )
    stats = rest(world)
    assert (stats["resumed_kept"], stats["resumed_recomputed"], stats["reprefilled_tokens"]) == (2, 0, 0)
    assert all(len(s.spans) == 1 for s in world.samples.values())
    world.step(2)
    assert not any(folder.files for folder in world.folders)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_kv_of_an_older_policy_is_what_it_was(world: CrashingHarness, kv: str) -> None:
    """`kept` under whichever version is named later; `recompute` prefills it again."""
    suspended_to_disk(world, 30)
    world.push_begin()
    world.push_end(3)
    world.crash()
    world.push_begin(3)
    world.push_end()
    world.open("run", {}, quota=None, kv=kv)
    stats = world.reply().stats
    assert (stats["resumed_kept"], stats["resumed_recomputed"]) == ((1, 0) if kv == "keep" else (0, 1))
    (sample,) = (s for (key, _), s in world.samples.items() if key[1] == "p1")
    assert [(s.version, s.kv) for s in sample.spans] == [(0, "fresh"), (3, "kept" if kv == "keep" else "recomputed")]


def test_a_bound_of_staleness_reaches_over_the_restart(world: CrashingHarness) -> None:
    """What is too old must finish in its first round, on its kept KV."""
    suspended_to_disk(world, 30)
    world.push_begin()
    world.push_end(2)
    world.crash()
    world.push_begin(2)
    world.push_end()
    world.open("run", {"new": (3, 1, -2)}, quota=1, max_staleness=2)
    reply = world.reply()
    assert reply.deliver[0].id == "p1"
    assert reply.stats["resumed_kept"] == 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_has_not_none_uses(world: CrashingHarness, rank: int, fault: str) -> None:
    """Both decide alike; damage is counted and told, a file that was not there yet is no fault."""
    suspended_to_disk(world, 30, 40)
    damage(world, rank, 0, fault)
    world.crash()
    assert tiers(world, "run") == {"p1": "none", "p2": "disk"}
    report = world.controller.tiers.report()
    assert report["lost"] == (fault == "flip")
    assert (f"rank {rank}: " in report["last_failure"]) == (fault == "flip")
    assert all(len(folder.files) == 1 for folder in world.folders), "what nobody uses is removed everywhere"
    stats = rest(world)
    assert (stats["resumed_kept"], stats["resumed_recomputed"], stats["kv_lost"]) == (1, 1, int(fault == "flip"))


def test_a_round_that_was_open_is_told_of_the_damage(world: CrashingHarness) -> None:
    suspended_to_disk(world, 30)
    world.open("run", {}, quota=None)
    damage(world, 1, 0, "flip")
    world.crash()
    stats = world.reply().stats
    assert stats["kv_lost"] == 1
    assert any("rank 1: OSError: flipped" in warning for warning in stats["warnings"])


def test_an_older_file_is_not_used(tmp_path: Path) -> None:
    """The sample has run on, and its file's removal was still to come when the server died."""
    world = CrashingHarness(tmp_path / "j", replicas=2, disk_cap=1000, copy_delay=40)
    world.open("run", lengths(2, 30), quota=1, tier="disk")
    world.reply()
    world.step(50)
    world.open("run", {"p2": (3, 1, -5)}, quota=1, tier="none")
    world.reply()
    assert all(folder.files for folder in world.folders)
    world.crash()
    assert tiers(world, "run") == {"p1": "none"}
    assert world.controller.tiers.report()["lost"] == 0
    assert not any(folder.files for folder in world.folders)


def test_a_life_without_the_disk_tier_makes_its_files_strangers(world: CrashingHarness) -> None:
    """They may be of another history of the same samples: as many tokens, drawn again."""
    suspended_to_disk(world, 30)
    world.crash(disk=False)
    assert all(folder.files for folder in world.folders)
    world.crash()
    assert tiers(world, "run") == {"p1": "none"}
    assert not any(folder.files for folder in world.folders)


def test_a_smaller_budget_keeps_the_longest(world: CrashingHarness) -> None:
    """Placement as ever: the least recompute time per byte gives way."""
    world.open("run", {"end": (3, 1, -2), "long": (9, 1, -30), "short": (3, 1, -30)}, quota=1, tier="disk")
    world.reply()
    world.step(2)
    pages = world.sample("run", "long").kv.pages
    assert pages is not None
    world.disk_cap = pages.length
    world.crash()
    assert tiers(world, "run") == {"long": "disk", "short": "none"}
    world.step()
    assert all(len(folder.files) == 1 for folder in world.folders)


@pytest.mark.parametrize(
    ("said", "together"),
    [
        ([["", "", None, "x"]], ["", "", None, "x"]),
        ([["", "", None], ["", None, "x"]], ["", None, "rank 1: x"]),
        ([["y", ""], ["x", ""]], ["rank 0: y", ""]),
        ([[], []], []),
    ],
)
def test_ranks_agree_on_the_worst(said: list[list[Outcome]], together: list[Outcome]) -> None:
    assert combine_outcomes(said) == together


class Lives:
    """A random story: put, promote, demote, evict, resume, drop, crash, reopen."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.world = CrashingHarness(
            path,
            replicas=2,
            slots=4,
            overlap=rng.random() < 0.5,
            disk_cap=rng.choice((40, 1000)),
            host_cap=rng.choice((0, 40)),
            copy_delay=rng.choice((0, 1, 4)),
        )
        self.prompts = 0

    def tell(self, events: int) -> None:
        acts = [self.round, self.round, self.round, self.push, self.drop, self.crash]
        for _ in range(events):
            self.rng.choice(acts)()
        self.world.drain()
        self.world.close()

    def round(self) -> None:
        """Some new samples and the old ones; mostly it ends when it has run for a while, sometimes it stays open."""
        world, rng = self.world, self.rng
        if world.controller.context.clock.closed:
            self.push(0)
        count = rng.randint(0, 3)
        prompts = {f"p{self.prompts + i}": (rng.randint(1, 9), 1, -rng.choice((12, 25))) for i in range(count)}
        self.prompts += count
        if "run" not in world.rounds:
            tier, kv = rng.choice(("disk", "disk", "host", "auto")), rng.choice(("keep", "keep", "recompute"))
            world.open("run", prompts, quota=None, tier=tier, kv=kv)
        world.step(rng.randint(0, 8))
        if rng.random() < 0.8:
            world.stop("run")
            world.step(rng.randint(0, 6))

    def push(self, ahead: int | None = None) -> None:
        ahead = self.rng.randint(0, 2) if ahead is None else ahead
        assert self.world.push_begin() == 200
        assert self.world.push_end(self.world.version + ahead if ahead else None) == 200

    def drop(self) -> None:
        if names := sorted(key[1] for key in self.world.groups):
            self.world.drop("run", [self.rng.choice(names)])

    def crash(self) -> None:
        """Each rank's store may have got further than the other's; files may be flipped, or go away."""
        for engine in self.world.engines:
            engine.copies.carry_out_first(self.rng.choice((0, 0, 1, 3)))
        if self.rng.random() < 0.3:
            damage(self.world, self.rng.randint(0, 1), self.rng.randint(0, 2), self.rng.choice(FAULTS))
        self.world.crash(disk=self.rng.random() < 0.8)


def test_any_story_of_lives_with_a_disk_tier(tmp_path: Path) -> None:
    """After every crash: KV of other tokens is never used, and what is sound on all ranks is used."""
    regained = crashes = 0
    for seed in range(STORIES):
        lives = Lives(tmp_path / str(seed), seed)
        lives.tell(EVENTS)
        regained += lives.world.regained
        crashes += lives.world.crashes
    print(f"{crashes} crashes, {regained} partials had their KV again")
    assert regained > STORIES
