"""A group's prompt is prefilled once: leaders, followers, and new leaders when the KV is evicted."""

import pytest

from sglang_april.scheduler.context import Context
from sglang_april.scheduler.prompts import PromptSharing
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.version_clock import VersionClock
from tests.unit.controller_harness import Build, ControllerHarness, lengths
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_request import Row
from tests.unit.ledger_driver import LedgerDriver, names


@pytest.fixture
def prompts() -> PromptSharing:
    return PromptSharing(Context(FakeEngine(shares=True), VersionClock(), 0))


def prefills(w: ControllerHarness) -> list[int]:
    """The number of samples of each prefill from now on."""
    seen: list[int] = []
    check = w.engine.on_forward

    def forward(rows: list[Row]) -> None:
        if rows[0].prefilled:
            seen.append(len(rows))
        check(rows)

    w.engine.on_forward = forward
    return seen


def led(prompts: PromptSharing) -> tuple[LedgerDriver, Sample, Sample]:
    """A group whose first member is being prefilled; returns that member and another."""
    driver = LedgerDriver()
    (group,) = driver.groups(3)
    leader, other, _ = group.samples.values()
    prompts.prefill_queued(leader)
    driver.start(leader)
    return driver, leader, other


def test_one_sample_per_group_is_prefilled(prompts: PromptSharing) -> None:
    """For eight free slots: leaders of groups that fill them, and samples without followers."""
    driver = LedgerDriver()
    driver.groups(4, 1, 2, 4, 4)
    assert names(list(prompts.select_for_prefill(driver.round(), 8))) == ["g0.0", "g1.0", "g2.0", "g3.0"]
    assert names(list(prompts.select_for_prefill(driver.round(concurrency=4), 8))) == ["g0.0"]


def test_leaders_of_a_whole_batch_share_a_prefill(prompts: PromptSharing) -> None:
    """With 24 running samples and five free slots, followers of 29 samples find slots before the next prefill."""
    driver = LedgerDriver()
    driver.start(*(g.samples[0] for g in driver.groups(*[1] * 24)))
    driver.groups(*[8] * 9)
    assert names(list(prompts.select_for_prefill(driver.round(), 5))) == [f"g{i}.0" for i in (24, 25, 26, 27)]
    assert names(list(prompts.select_for_prefill(driver.round(), 2))) == ["g24.0", "g25.0"]


def test_members_follow_only_after_the_prompt_is_prefilled(prompts: PromptSharing) -> None:
    driver, leader, other = led(prompts)
    assert prompts.awaits_leader(other)
    assert not prompts.can_follow(other)
    assert names(list(prompts.select_for_prefill(driver.round(), 8))) == []
    prompts.prefilled(leader)
    driver.grow(leader)
    assert prompts.can_follow(other)
    assert not prompts.awaits_leader(other)
    assert not prompts.can_follow(leader), "it has a token"
    assert names(list(prompts.select_for_prefill(driver.round(), 8))) == []


def test_another_leads_when_the_leader_leaves_without_a_token(prompts: PromptSharing) -> None:
    driver, leader, other = led(prompts)
    driver.ledger.suspend(leader)
    assert not prompts.awaits_leader(other)
    assert names(list(prompts.select_for_prefill(driver.round(), 8))) == ["g0.0"]


def test_followers_need_no_prefill(harness: Build) -> None:
    """Twelve groups of four on eight slots: one row of a prefill each; tokens and spans are checked by the harness."""
    w = harness(slots=8, pool=2000, chunk=64, shares=True)
    rows = prefills(w)
    w.open("run", {f"p{i}": (5, 4, 9 + i % 5) for i in range(12)}, quota=12)
    reply = w.reply()
    assert sum(rows) == 12
    assert reply.stats["started"] == 48
    assert reply.stats["started_on_prompt_kv"] == 36
    assert w.engine.followed == 36


def test_without_sharing_every_member_is_prefilled(harness: Build) -> None:
    """Pages of more than one token, penalties, a grammar, no tree: as SGLang does it."""
    w = harness(slots=8, pool=2000, chunk=64)
    rows = prefills(w)
    w.open("run", {f"p{i}": (5, 4, 9 + i % 5) for i in range(12)}, quota=12)
    assert w.reply().stats["started_on_prompt_kv"] == 0
    assert sum(rows) == 48


def test_a_new_policy_version_needs_new_leaders(harness: Build) -> None:
    """KV of one version is never a prefix under another (`no-mixed-version-prefix`)."""
    w = harness(slots=2, pool=300, chunk=64, shares=True)
    rows = prefills(w)
    w.open("run", {"p": (5, 8, -20)}, quota=1)
    w.step(6)
    w.push_begin()
    w.push_end()
    w.reply()
    assert sum(rows) == 2, "six members had not begun: one of them leads"
    assert w.engine.followed == 6


def test_evicted_prompt_kv_is_computed_again(harness: Build) -> None:
    """The radix tree can evict an unused prompt, and a flush clears it."""
    w = harness(slots=2, pool=300, chunk=64, shares=True)
    rows = prefills(w)
    w.open("run", {"p": (5, 8, -20)}, quota=1)
    w.step(6)
    w.do(lambda e: e.prompts.clear())
    w.reply()
    assert sum(rows) == 2
    assert w.engine.followed == 6


def test_evicted_prompt_kv_is_searched_once_per_step(harness: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lookup fails; the new leader's six followers find the KV."""
    w = harness(slots=8, pool=1000, chunk=64, shares=True)
    w.open("run", {"p": (5, 16, -20)}, quota=1)
    while w.engine.followed < 8:
        w.step(1)
    w.do(lambda e: e.prompts.clear())
    found: list[bool] = []
    follow = w.engine.follow
    monkeypatch.setattr(w.engine, "follow", lambda sample: found.append(follow(sample)) or found[-1])
    w.reply()
    assert found == [False] + [True] * 6


def test_stock_requests_are_served_while_followers_join(harness: Build) -> None:
    """A join launches no prefill, so `/generate` gets every second step."""
    w = harness(slots=2, pool=300, chunk=64, shares=True)
    w.open("run", {f"p{i}": (5, 8, -2) for i in range(8)}, quota=8)
    w.step(3)
    foreign = w.do(lambda e: e.add_foreign_request("s", 7, 4, 3))
    w.step(24)
    assert foreign.reason is not None
    w.reply()


def test_stock_requests_are_served_while_followers_join_in_every_step(harness: Build) -> None:
    """A waiting prefill gets every second step, however many slots are free."""
    w = harness(slots=24, pool=4000, chunk=64, shares=True)
    for length in (3, 4, 5, 7):
        w.open(f"run-{length}", {"p": (5, 100, -length)}, quota=1)
    w.step(30)
    foreign = w.do(lambda e: e.add_foreign_request("s", 7, 4, 3))
    w.step(6)
    assert foreign.reason is not None


def test_leaders_do_not_give_their_slots_to_running_ahead(harness: Build) -> None:
    """The slots that leaders leave free are for their followers, not for a run that runs ahead; its partials wait and
    resume on their KV."""
    w = harness(slots=8, pool=2000, chunk=64, shares=True)
    w.open("b", lengths(2, 40, 40, 40, 40, 40), quota=1, ahead=4, after_quota="continue")
    w.reply("b")
    w.open("a", {f"a{i}": (5, 4, -12) for i in range(4)}, quota=4)
    w.step(4)
    w.push_begin()
    w.push_end()
    w.step(3)
    assert w.ledger.runs["b"].suspended, "all slots are for the open round"
    w.reply("a")
    w.step(40)
    kinds = {span.kv for i in range(1, 6) for span in w.sample("b", f"p{i}").closed_spans()}
    assert kinds == {"fresh", "kept"}


def test_two_runs_have_equal_shares_of_a_prefill(harness: Build) -> None:
    """Round-robin: 16 slots each, of which one run's leader leaves 15 to its followers, not to the other run."""
    w = harness(slots=32, pool=4000, chunk=400, shares=True)
    rows = prefills(w)
    w.freeze(True)
    w.open("a", {f"a{i}": (5, 16, -20) for i in range(4)}, quota=4)
    w.open("b", {f"b{i}": (5, 1, -20) for i in range(40)}, quota=40)
    w.freeze(False)
    w.step(2)
    assert rows[0] == 1 + 16
