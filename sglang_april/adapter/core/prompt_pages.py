"""Starts a sample on the prompt KV of a group member that has already been prefilled.

SGLang inserts that KV into its tree after the prefill (`cache_unfinished_req`). A decode step writes the KV of its
input token and samples the next one, so a decode step on the prompt's last token replaces the prefill.
"""

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.proximal import is_penalised
from sglang_april.adapter.core.request import has_grammar, params_of
from sglang_april.adapter.shapes.installed import shape
from sglang_april.kv.kv_pages import Pages
from sglang_april.scheduler.state import Group, Sample


class PromptPages:
    """Which groups share the KV of their prompt, and the pages of those that start on it."""

    def __init__(self, scheduler: Scheduler) -> None:
        tree = scheduler.tree_cache
        self._tree = tree
        self._page: int = scheduler.token_to_kv_pool_allocator.page_size
        # Deterministic inference must not depend on the other requests, but they decide which member is prefilled.
        self._off = not shape.has_tree(tree) or bool(
            shape.resolved(scheduler.server_args).enable_deterministic_inference
        )

    def shares(self, group: Group) -> bool:
        """The tree keeps whole pages, so the last token must be the first of its page.

        Penalties would count that token as one of the output, and a grammar is compiled in the waiting queue.
        """
        before_last = len(group.prompt.input_ids) // 4 - 1
        if self._off or group.prompt.n == 1 or before_last < 1 or before_last % self._page:
            return False
        return not is_penalised(params_of(group)) and not has_grammar(group)

    def find(self, req: Req) -> Pages | None:
        """Pages of the prompt without its last token, locked in the tree; None if the tree lacks some of them."""
        length = len(req.origin_input_ids) - 1
        found = shape.lock_prefix(self._tree, req, length)
        if found is None:
            return None
        # The lock equals that of the prefilled member, so that all members share one copy on the host.
        slots, lock = found
        return Pages(length, length, slots, lock, req.extra_key)


def reserved_output_tokens(sample: Sample) -> int:
    """Output tokens that SGLang's admission will set aside for a sample that has no request yet."""
    lengths = sample.group.prompt.max_new_tokens
    most = lengths[sample.index] if lengths is not None else params_of(sample.group).max_new_tokens
    return min(most if most is not None else CLIP_MAX_NEW_TOKENS, CLIP_MAX_NEW_TOKENS)
