"""Budgets of the host and disk tiers, in tokens and whole pages of the store. A shared prompt prefix counts once."""

from sglang_april.kv.kv_pages import Copy, CopyTier, Pages, Prefix
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Sample


class TierBudget:
    """Numbers of copies and orders, tokens used per tier, and the users of each prefix; the same on every rank."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._last_number = 0
        self.used: dict[CopyTier, int] = {"host": 0, "disk": 0}

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def round_up(self, tokens: int) -> int:
        """Round tokens up to whole pages of the store."""
        page = self._c.store_page
        return -(-tokens // page) * page

    def new_copy(self, tier: CopyTier, length: int, prefix: Prefix | None) -> Copy:
        """Reserve room for a copy of `length` tokens after the prefix."""
        cost = self.round_up(length)
        self.used[tier] += cost
        return Copy(self.next_number(), tier, cost, prefix)

    # --- prefixes

    def prefix_for(self, sample: Sample, pages: Pages) -> Prefix | None:
        """The stored prefix that a new copy of the sample begins with; the copy becomes a user of it."""
        prefix, length = self._find_prefix(sample, pages)
        if prefix is None and length:
            prefix = sample.group.prefix = Prefix(self.next_number(), length, pages.node)
        if prefix is not None:
            self._add_user(prefix)
        return prefix

    def tokens_on_host(self, sample: Sample, pages: Pages) -> int:
        """Leading tokens of the sample that the host already stores, so that a copy of it needs no room for them."""
        prefix, _ = self._find_prefix(sample, pages)
        return prefix.length if prefix is not None else 0

    def _find_prefix(self, sample: Sample, pages: Pages) -> tuple[Prefix | None, int]:
        """The stored prefix with which the sample's KV begins, else None and how many tokens can be stored as one."""
        if sample.kv.prefix is not None:
            return sample.kv.prefix, sample.kv.prefix.length
        # A leader's protected part is its whole prompt, a follower's all but the last token.
        shared = min(pages.protected, len(sample.group.prompt.input_ids) // 4 - 1)
        length = shared // self._c.store_page * self._c.store_page
        if pages.node is None or not length:
            return None, 0
        prefix = sample.group.prefix
        matches = prefix is not None and prefix.node == pages.node and prefix.length == length
        return (prefix if matches else None), length

    def keep_prefix(self, sample: Sample, prefix: Prefix) -> None:
        """The sample runs on KV that begins with the prefix, so its next copy need not copy it again."""
        if sample.kv.prefix is None:
            self._add_user(prefix)
            sample.kv.prefix = prefix

    def drop_prefix(self, sample: Sample) -> None:
        """The sample no longer shares a stored prefix: its KV was discarded, or is complete in one place."""
        if sample.kv.prefix is not None:
            self.drop_user(sample.kv.prefix)
            sample.kv.prefix = None

    def drop_user(self, prefix: Prefix) -> None:
        """Discard the prefix with its last user."""
        prefix.users -= 1
        if not prefix.users:
            self.used["host"] -= prefix.length
            # A later user stores it again: the node may hold other pages by then.
            prefix.node = None
            self._c.engine.discard(prefix.number)

    def _add_user(self, prefix: Prefix) -> None:
        if not prefix.users:
            self.used["host"] += prefix.length
        prefix.users += 1
