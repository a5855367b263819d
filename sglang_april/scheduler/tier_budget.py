"""Step 5 of 9 (store): what copies cost their tiers, in tokens and whole pages; a shared prompt counts once."""

from sglang_april.kv.kv_pages import Copy, CopyTier, Pages, Prefix
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Sample


class TierBudget:
    """Names for copies and orders, budgets used, and who stands on which prefix; the same on every rank."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._numbers = 0
        self.used: dict[CopyTier, int] = {"host": 0, "disk": 0}

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def round_up(self, tokens: int) -> int:
        page = self._c.store_page
        return -(-tokens // page) * page

    def copy(self, tier: CopyTier, length: int, prefix: Prefix | None) -> Copy:
        """A copy of so many tokens behind the prefix, from now on part of the tier."""
        cost = self.round_up(length)
        self.used[tier] += cost
        return Copy(self.number(), tier, cost, prefix)

    # --- prefixes

    def prefix_for(self, sample: Sample, pages: Pages) -> Prefix | None:
        """What the sample's first tokens are, or will be, stored under; picked up once, for a copy."""
        # A leader stands on its whole prompt, a follower on all but its last token.
        shared = min(pages.protected, len(sample.group.prompt.input_ids) // 4 - 1)
        length = shared // self._c.store_page * self._c.store_page
        prefix, group = sample.prefix, sample.group
        if prefix is None and length and pages.node is not None:
            prefix = group.prefix
            if prefix is None or prefix.node is not pages.node or prefix.length != length:
                prefix = group.prefix = Prefix(self.number(), length, pages.node)
        if prefix is not None:
            self._pick_up(prefix)
        return prefix

    def stand_on(self, sample: Sample, prefix: Prefix) -> None:
        """The sample runs on KV that begins with this; its next copy will not copy it again."""
        if sample.prefix is None:
            self._pick_up(prefix)
            sample.prefix = prefix

    def put_down(self, prefix: Prefix) -> None:
        prefix.users -= 1
        if not prefix.users:
            self.used["host"] -= prefix.length
            # Whoever comes later stores it again: the node may hold other pages by then.
            prefix.node = None
            self._c.engine.discard(prefix.number)

    def _pick_up(self, prefix: Prefix) -> None:
        if not prefix.users:
            self.used["host"] += prefix.length
        prefix.users += 1
