"""Decisions of `Tiers`: shared prompts, budgets, failed copies, integrity checks."""

from typing import Any

import pytest

from sglang_april.api import messages
from sglang_april.kv.kv_pages import KvState, KvStateError, Pages
from sglang_april.scheduler import report
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.tiers import Tiers
from sglang_april.scheduler.version_clock import VersionClock
from tests.unit.controller_harness import Build, lengths
from tests.unit.ledger_driver import LedgerDriver, prompt
from tests.unit.test_pressure import tiers as tiers_of

PAGE = 16


class Orders:
    """An engine that records its orders."""

    kv_pages = "full"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def copy_out(self, sample: Sample, order: int) -> None:
        copy = sample.kv.pages.copy  # type: ignore[union-attr]
        prefix = (copy.prefix.number, copy.prefix.length) if copy.prefix else None  # type: ignore[union-attr]
        self.calls.append(("out", order, copy.tier, prefix))  # type: ignore[union-attr]

    def spill(self, sample: Sample, order: int) -> None:
        self.calls.append(("spill", order))

    def load(self, sample: Sample, order: int) -> bool:
        sample.kv.pages.slots = [0] * sample.kv.pages.length  # type: ignore[union-attr]
        self.calls.append(("load", order))
        return True

    def wait(self, order: int) -> None:
        self.calls.append(("wait", order))

    def mid_prefill(self) -> bool:
        return False

    def tokens_free(self) -> int:
        return 1000

    def tokens_for_next_decode(self) -> int:
        return 0

    def cancel(self, order: int) -> None:
        self.calls.append(("cancel", order))

    def discard(self, number: int) -> None:
        self.calls.append(("discard", number))

    def free_pages(self, pages: Pages) -> None:
        pages.slots = pages.node = None
        pages.protected = 0

    def release(self, sample: Sample) -> None:
        sample.kv.pages = None


class FourPartials:
    """Four partials of one prompt of 40 tokens: the tree owns its slots."""

    def __init__(self, host: int = 1000, disk: int = 0, prompt_tokens: int = 40) -> None:
        self.engine: Any = Orders()
        driver = LedgerDriver()
        self.context = Context(self.engine, VersionClock(), host, disk, PAGE, ledger=driver.ledger)
        self.tiers = Tiers(self.context)
        self.driver, self.node = driver, object()
        (group,) = driver.accept(prompt("g0", 4, tokens=prompt_tokens))
        self.samples = list(group.samples.values())
        for i, sample in enumerate(self.samples):
            driver.start(sample)
            driver.grow(sample, tokens=10)
            self.suspend(sample, 50 + i)

    def suspend(self, sample: Sample, length: int, *, in_tree: bool = True) -> None:
        self.driver.ledger.suspend(sample)
        node = self.node if in_tree else None
        sample.kv.pages = Pages(length, 40 if in_tree else 0, [0] * length, node, "")
        self.tiers.add_suspended([sample])

    def complete(self) -> None:
        self.tiers.orders_ended(
            messages.Moved([call[1] for call in self.engine.calls if call[0] in ("out", "load", "spill")])
        )

    def resume(self, sample: Sample) -> None:
        assert self.tiers.load(sample)
        self.complete()
        self.tiers.prepare_resume(sample)
        sample.kv.pages = None
        self.driver.ledger.admit(sample)


def test_a_prompt_is_stored_once_until_its_last_user_is_gone() -> None:
    """Of 40 tokens in the radix tree, 32 (whole pages of 16) are stored once, also for later suspensions."""
    g = FourPartials()
    for sample in g.samples:
        g.tiers.demote(sample)
    ((number, length),) = {call[3] for call in g.engine.calls}
    assert (length, g.tiers.used["host"]) == (32, 32 + 4 * 32)
    g.complete()
    for sample in g.samples[:2]:
        g.resume(sample)
    assert g.tiers.used["host"] == 32 + 2 * 32
    g.suspend(g.samples[0], 60, in_tree=False)
    g.tiers.demote(g.samples[0])
    assert g.engine.calls[-1][3] == (number, 32)
    assert g.tiers.used["host"] == 32 + 2 * 32 + 32
    for sample in (g.samples[0], *g.samples[2:]):
        g.tiers.release(sample)
    assert ("discard", number) not in g.engine.calls
    g.tiers.drop_prefix(g.samples[1])
    assert g.engine.calls[-1] == ("discard", number)
    assert g.tiers.used == {"host": 0, "disk": 0}


def test_room_is_made_only_for_what_follows_a_stored_prompt() -> None:
    """The host has exactly the 32 + 4 * 32 tokens that the prompt and the four partials behind it take."""
    g = FourPartials(host=160)
    for sample in g.samples:
        g.tiers.demote(sample)
    assert [s.kv.pages.tier if s.kv.pages else "none" for s in g.samples] == ["host"] * 4
    assert g.tiers.used["host"] == 160


def test_a_prompt_that_leaves_with_its_last_user_is_stored_again_within_the_cap() -> None:
    g = FourPartials(host=64)
    for sample in g.samples:
        g.tiers.demote(sample)
        assert g.tiers.used["host"] == 64
    assert [s.kv.pages.tier if s.kv.pages else "none" for s in g.samples] == ["none"] * 3 + ["host"]


def test_a_leader_and_its_followers_share_a_prefix() -> None:
    """The leader's prefix has 48 tokens, a follower's 47; both share the 32 in whole pages."""
    g = FourPartials(prompt_tokens=48)
    for sample, protected in zip(g.samples, (47, 48, 47, 48), strict=True):
        sample.kv.pages.protected = protected  # type: ignore[union-attr]
        g.tiers.demote(sample)
    assert {call[3] for call in g.engine.calls} == {(g.engine.calls[0][3][0], 32)}


def test_a_recomputed_prompt_is_another_prefix() -> None:
    """Another tree node may hold different bits."""
    g = FourPartials()
    g.tiers.demote(g.samples[0])
    g.node = object()
    g.samples[1].kv.pages.node = g.node  # type: ignore[union-attr]
    g.tiers.demote(g.samples[1])
    assert g.engine.calls[0][3] != g.engine.calls[1][3]
    assert g.tiers.used["host"] == 2 * (32 + 32)


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_copy_that_is_discarded_while_it_is_made_is_cancelled_alone(spilled: bool, resumes: bool) -> None:
    """Its order reads slots, for the shared prompt too, which the discard lets others write. No queue is waited for."""
    g = FourPartials(disk=1000)
    sample = g.samples[0]
    g.tiers.demote(sample)
    order, pages = g.engine.calls[0][1], sample.kv.pages
    assert pages is not None
    if spilled:
        g.tiers._spill(sample)
    given = len(g.engine.calls)
    if resumes:
        g.tiers.prepare_resume(sample)
        g.tiers.drop_prefix(sample)
    else:
        g.tiers.release(sample)
    assert g.engine.calls[given] == ("cancel", order)
    assert {call[0] for call in g.engine.calls[given + 1 :]} == {"discard"}
    assert pages.state is (KvState.DEVICE if resumes else KvState.RELEASED)
    assert g.tiers.used == {"host": 0, "disk": 0}


def test_a_load_behind_the_spill_of_its_copy_is_cancelled_alone() -> None:
    g = FourPartials(disk=1000)
    sample = g.samples[0]
    g.tiers.demote(sample)
    g.complete()
    pages = sample.kv.pages
    assert pages is not None
    g.tiers._spill(sample)
    assert g.tiers.load(sample)
    order = pages.transfer
    g.tiers.demote(sample)
    assert g.engine.calls[-1] == ("cancel", order)
    assert (pages.state, pages.tier) == (KvState.STORED, "disk")
    assert g.tiers.load(sample)


def test_a_full_host_spills_to_the_disk_and_a_full_disk_evicts() -> None:
    """The lowest priority moves down: device, host, disk, tokens only."""
    g = FourPartials(host=96, disk=64)
    for sample in g.samples:
        g.tiers.demote(sample)
        g.complete()
    assert [s.kv.pages.tier if s.kv.pages else "none" for s in g.samples] == ["none", "disk", "host", "host"]
    assert g.tiers.used == {"host": 96, "disk": 64}
    for sample in g.samples:
        g.tiers.release(sample)
    assert g.tiers.used == {"host": 0, "disk": 0}


def test_slots_are_held_until_all_ranks_report_the_copy() -> None:
    """Neither the order nor this rank's own copy frees them (`pool-accounting`)."""
    g = FourPartials()
    g.tiers.demote(g.samples[0])
    pages = g.samples[0].kv.pages
    assert pages is not None
    assert pages.slots is not None
    assert (pages.tier, pages.ready) == ("host", True)
    g.complete()
    assert pages.slots is None
    assert g.tiers.load(g.samples[0])
    assert (pages.tier, pages.ready, pages.loading) == ("host", False, True)
    g.complete()
    assert (pages.tier, pages.ready) == ("device", True)


@pytest.mark.parametrize("fail_every", [1, 2])
def test_a_failed_copy_is_recomputed_counted_and_warned_of(harness: Build, fail_every: int) -> None:
    """Reported in `stats.kv_lost`, a warning, and the total in `/april/state`."""
    w = harness(fail_every=fail_every)
    w.open("run", lengths(2, 30, 30), quota=1, tier="host")
    w.reply()
    assert set(tiers_of(w, "run").values()) == {"host"}
    w.step(2)
    assert "none" in tiers_of(w, "run").values()
    w.open("run", {}, quota=None)
    stats = w.reply().stats
    lost = report.store(w.controller.context, w.controller.tiers)["lost"]
    assert stats["kv_lost"] == lost == (2 if fail_every == 1 else 1)
    assert stats["resumed_recomputed"] == lost
    assert {s.finish_reason["type"] for s in w.samples.values()} == {"stop"}


def test_an_integrity_check_is_answered_when_all_ranks_have_reported(harness: Build) -> None:
    """`GET /april/check`."""
    w = harness()
    w.open("run", lengths(2, 30), quota=1, tier="host")
    w.reply()
    seq = w.seq = w.seq + 1
    w._then = lambda answer: None
    for engine in w.engines:
        engine.controller.command(messages.GetState(seq=seq, check=True))
    assert seq not in w.answers
    w.step(2)
    assert w.answers.pop(seq).data == {"ok": True, "problem": ""}


K = KvState
KV_TRANSITIONS = {
    (K.DEVICE, K.COPYING_OUT),
    (K.DEVICE, K.RELEASED),
    (K.DEVICE_WITH_COPY, K.DEVICE),
    (K.DEVICE_WITH_COPY, K.STORED),
    (K.COPYING_OUT, K.DEVICE),
    (K.COPYING_OUT, K.COPYING_OUT_SLOTS_FREED),
    (K.COPYING_OUT, K.STORED),
    (K.COPYING_OUT_SLOTS_FREED, K.STORED),
    (K.COPYING_OUT_SLOTS_FREED, K.LOADING),
    (K.COPYING_OUT_SLOTS_FREED, K.RELEASED),
    (K.STORED, K.LOADING),
    (K.STORED, K.RELEASED),
    (K.LOADING, K.DEVICE_WITH_COPY),
    (K.LOADING, K.STORED),
}


@pytest.mark.parametrize("before", KvState)
@pytest.mark.parametrize("after", KvState)
def test_only_allowed_transitions_change_the_kv_state(before: KvState, after: KvState) -> None:
    pages = Pages(5, 0, None, None, None, before)
    if (before, after) in KV_TRANSITIONS:
        pages.change(after, transfer=1)
        assert pages.state is after
    else:
        with pytest.raises(KvStateError):
            pages.change(after, transfer=1)
        assert pages.state is before


def test_a_state_in_transfer_needs_a_transfer() -> None:
    with pytest.raises(KvStateError):
        Pages(5, 0, None, None, None).change(KvState.COPYING_OUT)
