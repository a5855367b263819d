"""The KV of an ended leg, behind which the request of the next one is prefilled (docs/trajectories.md)."""

from sglang.srt.managers.schedule_batch import Req

from sglang_april.adapter.shapes.installed import shape
from sglang_april.kv.kv_pages import Pages


def leg_prefix(req: Req, page_size: int) -> Pages | None:
    """The pages after which a leg without tokens is prefilled; None if it has none in the pool."""
    sample = req.april
    if sample is None or sample.length or not sample.attached or shape.has_kv(req):
        return None
    pages: Pages | None = sample.kv.pages
    if pages is None or not pages.ready:
        return None
    needs_logprobs = req.return_logprob and 0 <= req.logprob_start_len < prefix_tokens(pages, req, page_size)
    return None if needs_logprobs else pages


def prefix_tokens(pages: Pages, req: Req, page_size: int) -> int:
    """How many tokens of these pages a prefill begins after: whole pages, and not all tokens of the prompt."""
    return min(pages.length, len(req.origin_input_ids) - 1) // page_size * page_size
