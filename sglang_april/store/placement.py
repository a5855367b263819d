"""Step 5 of 9 (store): which partials give way when memory runs short.

Pure functions of lengths, staleness and budgets in tokens, so that every rank decides alike (S9). Recompute time per
byte grows with length (attention is quadratic, bytes are linear; `BW* = 2 b eff / (2 p + c T)` falls with T), so under
a byte budget the longest samples are kept first.
"""

from collections.abc import Callable, Iterable

from sglang_april.types import Sample


def by_worth(samples: Iterable[Sample], must_finish: Callable[[Sample], bool]) -> list[Sample]:
    """Samples with pages, the one that gives way first in front: not mandatory, then short, then late."""
    return sorted(samples, key=lambda s: (must_finish(s), s.pages.length if s.pages else 0, -s.order))


def room_on_host(newcomer: Sample, stored: list[Sample], used: int, cap: int) -> list[Sample] | None:
    """Who has to fall back to tokens only so that `newcomer` fits on the host tier.

    Args:
        newcomer: a sample with pages, not yet on the host.
        stored: samples on the host tier that are worth less than `newcomer`, the least worthy in front.
        used: tokens on the host tier now.
        cap: tokens that the host tier may hold.

    Returns:
        The samples to give up, or None when the newcomer itself has to.
    """
    need = newcomer.pages.length if newcomer.pages else 0
    evicted: list[Sample] = []
    for sample in stored:
        if used + need <= cap:
            break
        evicted.append(sample)
        used -= sample.pages.length if sample.pages else 0
    return evicted if used + need <= cap else None
