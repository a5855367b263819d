"""Pages in plain torch: the CPU path, and the reference for the Triton kernels.

Bytes are moved in the widest element that alignment allows, up to 16 bytes (complex128, which torch copies without
touching its bits): one gather per plane, written in place.
"""

from functools import lru_cache

import numpy as np
import torch

from april_kernels.kv_pages import layout
from april_kernels.kv_pages.layout import Packed, PlaneTable

_ELEMENT = {16: torch.complex128, 8: torch.int64, 4: torch.int32}
_CHECKSUM_WORDS = 1 << 14
"""Words mixed at a time, of one page or of several: the uint64 arrays of 128 KB stay in the L2 cache."""
_32 = np.uint64(32)


def pack(
    table: PlaneTable,
    slots: torch.Tensor,
    page_tokens: int,
    *,
    out: torch.Tensor | None = None,
    checksum: bool = False,
) -> Packed:
    """See `april_kernels.kv_pages.pack`. A slot beyond the pool raises IndexError."""
    slots = layout.checked_slots(table.device, slots)
    pages = layout.pages_for(table, slots, page_tokens, out)
    if slots.numel():
        grid = _token_grid(slots, page_tokens)
        padding, source = grid < 0, grid.clamp(min=0)
        any_padding = bool(padding.any())
        for plane, section in _sections(table, pages, page_tokens):
            torch.ops.aten.index.Tensor_out(plane, [source], out=section)
            if any_padding:
                section[padding] = 0
    return Packed(pages, globals()["checksum"](pages) if checksum else None)


def unpack(table: PlaneTable, slots: torch.Tensor, pages: torch.Tensor) -> None:
    """See `april_kernels.kv_pages.unpack`. A slot beyond the pool raises IndexError."""
    slots = layout.checked_slots(table.device, slots)
    page_tokens = table.page_tokens(pages)
    n_pages = layout.page_count(slots.numel(), page_tokens)
    layout.checked_pages(table.device, pages, n_pages, table.page_words(page_tokens))
    if not slots.numel():
        return
    grid = _token_grid(slots, page_tokens)
    live = grid >= 0
    # Usually only the last page has padding: all pages before the first one that has some need no mask.
    whole = int(live.all(dim=1).to(torch.int64).cumprod(0).sum())
    rest_live, rest_slots = live[whole:], grid[whole:][live[whole:]]
    for plane, section in _sections(table, pages, page_tokens):
        if whole:
            plane[grid[:whole]] = section[:whole]
        if rest_slots.numel():
            plane[rest_slots] = section[whole:][rest_live]


def checksum(pages: torch.Tensor) -> torch.Tensor:
    """See `april_kernels.kv_pages.checksum`. In numpy: torch has no logical shift of 64-bit integers."""
    words, keys = pages.cpu().numpy().view(np.uint32), _keys(pages.shape[1])
    across = max(1, min(words.shape[1], _CHECKSUM_WORDS))
    down = _CHECKSUM_WORDS // across
    mixed = np.empty((down, across), dtype=np.uint64)
    folded = np.empty_like(mixed)
    sums = np.zeros(len(words), dtype=np.uint64)
    for page in range(0, len(words), down):
        for first in range(0, words.shape[1], across):
            part = words[page : page + down, first : first + across]
            key = keys[first : first + across]
            z, high = (buffer[: len(part), : len(key)] for buffer in (mixed, folded))
            np.bitwise_xor(key, part, out=z)
            z *= key
            z ^= np.right_shift(z, _32, out=high)
            sums[page : page + down] += z.sum(axis=1, dtype=np.uint64)
    return torch.from_numpy(sums.view(np.int64)).to(pages.device)


@lru_cache(maxsize=4)
def _keys(words: int) -> np.ndarray:
    """uint64 [words], one odd key per place in a page: two rounds of multiply and fold over its index."""
    key = np.arange(1, words + 1, dtype=np.uint64)
    key *= np.uint64(layout.KEY_MULTIPLIERS[0])
    key ^= key >> _32
    key *= np.uint64(layout.KEY_MULTIPLIERS[1])
    key ^= key >> _32
    return key | np.uint64(1)


def _token_grid(slots: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """int64 [pages, page_tokens], the last page filled up with -1."""
    missing = -slots.numel() % page_tokens
    return torch.nn.functional.pad(slots, (0, missing), value=-1).view(-1, page_tokens)


def _sections(table: PlaneTable, pages: torch.Tensor, page_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per plane its pool side [slots, row] and its page side [pages, page_tokens, row], in the widest element."""
    element = _ELEMENT[layout.common_alignment(table, pages)]
    sections = []
    for plane, first, words in zip(table.planes, table.first_word, table.row_words, strict=True):
        section = pages[:, page_tokens * first : page_tokens * (first + words)].view(element)
        sections.append((plane.view(element), section.unflatten(1, (page_tokens, -1))))
    return sections
