"""Pool tokens that a sample takes, counted as SGLang's admission counts them."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_april.adapter.core.capacity import Capacity
from sglang_april.adapter.core.sample_output import SampleOutput
from sglang_april.kv.kv_pages import KvState, Pages

PAGE = 16


def test_a_suspended_sample_needs_room_for_what_it_may_still_draw() -> None:
    """Its tokens are packed, so the engine's request has none."""
    lists = SimpleNamespace(output_token_logprobs_val=[], output_top_logprobs_val=None)
    params = SimpleNamespace(max_new_tokens=100)
    req: Any = SimpleNamespace(output_ids=array("q", range(60)), logprob=lists, sampling_params=params)
    SampleOutput().pack(req)
    scheduler: Any = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE))
    sample: Any = SimpleNamespace(request=req, length=60)
    assert Capacity(scheduler).remaining_estimate(sample) == 40 + PAGE


def test_no_next_decode_needs_more_than_its_bound() -> None:
    """Rows of the running batch and of the last prefill each take at most a page."""

    def row(committed: int, *, finished: bool = False) -> Any:
        return SimpleNamespace(kv_committed_len=committed, finished=lambda: finished)

    prefill = SimpleNamespace(reqs=[row(PAGE), row(7)], forward_mode=SimpleNamespace(is_extend=lambda: True))
    running = SimpleNamespace(reqs=[row(2 * PAGE), row(2 * PAGE, finished=True), row(5)])
    scheduler: Any = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        page_size=PAGE,
        running_batch=running,
        last_batch=prefill,
        chunked_req=None,
    )
    capacity = Capacity(scheduler)
    assert (capacity.tokens_for_next_decode(), capacity.most_for_next_decode()) == (2 * PAGE, 5 * PAGE)
    scheduler.last_batch = running
    assert (capacity.tokens_for_next_decode(), capacity.most_for_next_decode()) == (PAGE, 3 * PAGE)


def test_an_attached_request_that_arrives_waits_as_a_stock_one() -> None:
    """Else rounds would get no slot while one always waits."""
    mine, arriving = SimpleNamespace(arriving=False), SimpleNamespace(arriving=True)
    queue = [SimpleNamespace(april=sample) for sample in (None, mine, arriving)]
    scheduler: Any = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        waiting_queue=queue,
        grammar_manager=SimpleNamespace(grammar_queue=queue),
        running_batch=SimpleNamespace(reqs=[]),
        last_batch=None,
        chunked_req=None,
        get_num_allocatable_reqs=lambda taken: 8 - taken,
    )
    assert (Capacity(scheduler).foreign_waiting(), Capacity(scheduler).free_slots()) == (2, 6)


def test_rows_of_the_last_prefill_run() -> None:
    """They join the running batch at the top of the next step."""
    running: Any = SimpleNamespace(reqs=[], is_empty=lambda: True)
    prefill: Any = SimpleNamespace(reqs=[object()], forward_mode=SimpleNamespace(is_extend=lambda: True))
    scheduler: Any = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        running_batch=running,
        last_batch=prefill,
        waiting_queue=[],
        chunked_req=None,
    )
    assert Capacity(scheduler).idle() is False
    scheduler.last_batch = None
    assert Capacity(scheduler).idle() is True


@pytest.mark.parametrize(
    ("ignore_eos", "tree", "output"), [(True, False, 16_000), (False, False, 4_096), (True, True, 4_096)]
)
def test_a_waiting_request_needs_what_sglang_sets_aside_for_it(ignore_eos: bool, tree: bool, output: int) -> None:
    """Without a radix tree all that it may draw, if it ignores the end of sequence (`add_one_req_ignore_eos`)."""
    params = SimpleNamespace(max_new_tokens=16_000, ignore_eos=ignore_eos)
    req: Any = SimpleNamespace(april=None, seqlen=1_000, output_ids=array("q"), sampling_params=params)
    scheduler: Any = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        waiting_queue=[req],
        tree_cache=SimpleNamespace(disable=not tree),
    )
    assert Capacity(scheduler).first_waiting_need() == 1_000 + output + PAGE


@pytest.mark.parametrize(
    ("asked", "stored", "tokens", "keeps"),
    [(-1, True, 1_000 - 480, True), (100, True, 1_000, False), (-1, False, 1_000, False)],
    ids=["behind", "logprobs", "stored"],
)
def test_a_waiting_leg_needs_no_room_for_the_kv_behind_which_it_is_prefilled(
    asked: int, stored: bool, tokens: int, keeps: bool
) -> None:
    """Whole pages of it, unless it asks for logprobs of these tokens."""
    pages = Pages(490, 0, range(490) if stored else None, None, None, KvState.DEVICE if stored else KvState.RELEASED)
    leg = SimpleNamespace(length=0, attached=True, kv=SimpleNamespace(pages=pages))
    req: Any = SimpleNamespace(
        april=leg,
        seqlen=1_000,
        origin_input_ids=range(1_000),
        output_ids=array("q"),
        sampling_params=SimpleNamespace(max_new_tokens=100, ignore_eos=True),
        return_logprob=True,
        logprob_start_len=asked,
        req_pool_idx=None,
    )
    scheduler: Any = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        waiting_queue=[req],
        tree_cache=SimpleNamespace(disable=True),
    )
    assert Capacity(scheduler).first_waiting_need() == tokens + 100 + PAGE
    assert Capacity(scheduler).first_waiting_on_kv() is (leg if keeps else None)
