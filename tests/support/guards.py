"""Guards that tests remove: name -> (function of the plugin, its replacement)."""

from collections.abc import Callable
from typing import Any

APRIL = "sglang_april."


def _insert_anyway(guarded: Callable[..., Any], pool: Any, reqs: Any, pages: Any, on_old_kv: list[bool]) -> Any:
    return guarded(pool, reqs, pages, [False] * len(on_old_kv))


def _no_version(guarded: Callable[..., Any], base: str | None, version: int) -> str | None:
    return base


def _nothing(guarded: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    return None


def _unaccounted(guarded: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    return 0


def _some_steps_later(guarded: Callable[..., Any], round_end: Any) -> None:
    step = round_end.context.step
    if not any(r.ends_now() for r in round_end.context.rounds.values()):
        round_end.over_since = None
    elif getattr(round_end, "over_since", None) is None:
        round_end.over_since = step
    elif step - round_end.over_since >= 3:
        guarded(round_end)


def _keep_delivered(guarded: Callable[..., Any], ledger: Any, group: Any, indices: list[int]) -> Any:
    from sglang_april.api.messages import Delivery

    return Delivery(group.id, group.incarnation, sorted(indices), True)


def _leak_a_page(guarded: Callable[..., Any], pool: Any, pages: Any) -> None:
    if pages.slots is not None:
        pages.slots = pages.slots[:-1]
    guarded(pool, pages)


def _free_a_shared_page(guarded: Callable[..., Any], pool: Any, pages: Any) -> None:
    shared = pages.slots[: pages.protected] if pages.slots is not None else None
    guarded(pool, pages)
    if shared is not None:
        pool._allocator.free(shared[-1:])


def _damage_a_page(guarded: Callable[..., Any], pool: Any, reqs: Any, pages: Any, on_old_kv: list[bool]) -> Any:
    kv = pool._s.token_to_kv_pool_allocator.get_kvcache()
    for page in pages:
        for values in kv.v_buffer:
            values[page.slots[page.length // 2]] += 4.0
    return guarded(pool, reqs, pages, on_old_kv)


def _kept_as_fresh(guarded: Callable[..., Any], sample: Any, version: int, kv: str) -> None:
    guarded(sample, version, "fresh")


def _old_as_new(guarded: Callable[..., Any], sample: Any, version: int, kv: str) -> None:
    sample.spans.clear()
    sample.length, length = 0, sample.length
    guarded(sample, version, "fresh")
    sample.length = length


def _fail(guarded: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the guard is removed")


GUARDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "tree insert": (APRIL + "adapter.core.page_pool.PagePool.build_decode_batch", _insert_anyway),
    "version key": (APRIL + "adapter.core.request.versioned_key", _no_version),
    "flush rescue": (APRIL + "scheduler.suspend.Suspender.evacuate", _nothing),
    "accounting": (APRIL + "adapter.core.engine.SchedulerEngine.held_tokens", _unaccounted),
    "in-step stop": (APRIL + "scheduler.round_end.RoundEnd.end_due", _some_steps_later),
    "no sleep on work": (APRIL + "scheduler.resume.Resumer.has_work", _nothing),
    "every page freed": (APRIL + "adapter.core.page_pool.PagePool.free_slots", _leak_a_page),
    "no shared page freed": (APRIL + "adapter.core.page_pool.PagePool.free_slots", _free_a_shared_page),
    "penalty replay": (APRIL + "adapter.core.penalties.replay_penalties", _nothing),
    "suspend": (APRIL + "scheduler.suspend.Suspender.suspend_all", _fail),
    "decisions compared": (APRIL + "adapter.core.rank0_broadcast.Rank0Broadcast.compare", _nothing),
    "sound pages": (APRIL + "adapter.core.page_pool.PagePool.build_decode_batch", _damage_a_page),
    "kept span": (APRIL + "scheduler.state.Sample.open_span", _kept_as_fresh),
    "span version": (APRIL + "scheduler.state.Sample.open_span", _old_as_new),
    "deliver once": (APRIL + "scheduler.ledger.Ledger.deliver", _keep_delivered),
}
