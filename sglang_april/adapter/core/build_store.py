"""Builds one rank's page store on SGLang's KV pool (MHA or MLA)."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.rank0_broadcast import Rank0Broadcast
from sglang_april.adapter.core.supported_pools import check_scheduler, plane_table
from sglang_april.adapter.shapes.installed import shape
from sglang_april.config import AprilConfig
from sglang_april.kv.copiers import copier_for
from sglang_april.kv.disk_tier import DiskError, DiskTier, Key
from sglang_april.kv.host_tier import HostArena
from sglang_april.kv.page_format import PAGE_FORMATS, PageFormat
from sglang_april.kv.page_store import PageStore
from sglang_april.scheduler.state import Sample

PAGE_TOKENS = 16
"""Tokens per page of the store, for every page size of the pool; a partial wastes at most 15 tokens."""


class TierBudgets(NamedTuple):
    """Tokens that each tier may hold, a multiple of the store's page."""

    host: int
    disk: int
    page_tokens: int


def select_page_format(s: Scheduler, config: AprilConfig) -> PageFormat:
    """The page format that `--april-kv-pages` names.

    Raises:
        SystemExit: the pool is not supported, or the format does not support its layout or dtype.
    """
    check_scheduler(s)
    try:
        return PAGE_FORMATS[config.kv_pages](plane_table(s.token_to_kv_pool_allocator.get_kvcache()), PAGE_TOKENS)
    except ValueError as error:
        raise SystemExit(f"sglang-april: --april-kv-pages {config.kv_pages} is not supported: {error}.") from error


def tier_budgets(config: AprilConfig, page_format: PageFormat, ranks: int, local_ranks: int) -> TierBudgets:
    """The budgets that this rank's machine and flags allow; `local_ranks` ranks run on this machine."""
    page = 4 * page_format.page_words * ranks
    host, disk = config.host_bytes(ranks, local_ranks), config.disk_bytes
    return TierBudgets(host // page * PAGE_TOKENS, disk // page * PAGE_TOKENS, PAGE_TOKENS)


def key_of(sample: Sample) -> Key:
    group = sample.group
    return Key(group.run.key, group.id, group.incarnation, sample.index)


def build_store(
    s: Scheduler, config: AprilConfig, page_format: PageFormat, budgets: TierBudgets, broadcast: Rank0Broadcast
) -> PageStore:
    """This rank's page store.

    Raises:
        SystemExit: the disk tier's directory cannot be used.
    """
    copier = copier_for(page_format, [s.forward_stream, s.copy_stream])
    disk = None
    try:
        if config.disk_dir is not None:
            rank, layout = shape.tp_rank(s), _layout(s, page_format)
            folder, ranks = Path(config.disk_dir), shape.tp_size(s)
            disk = DiskTier(folder, rank, layout, budgets.page_tokens, copier.page_words, ranks=ranks)
    except DiskError as error:
        raise SystemExit(f"sglang-april: {error}.") from error
    pinned = page_format.table.device.type != "cpu"
    return PageStore(
        copier, HostArena(budgets.host // budgets.page_tokens, copier.page_words, pinned=pinned), disk, broadcast.report
    )


def _layout(s: Scheduler, page_format: PageFormat) -> str:
    """Digest of the KV layout, without the model's path: with `kv: keep`, a later checkpoint resumes from older KV."""
    config = s.model_config.hf_config
    rope = [getattr(config, name, None) for name in ("rope_theta", "rope_scaling", "rope_parameters")]
    # The pool's dtype besides the buffers': SGLang stores every fp8 format as uint8.
    dtype = s.token_to_kv_pool_allocator.get_kvcache().dtype
    rows = [page_format.name, dtype, *((str(b.dtype), *b.shape[1:]) for b in page_format.table.buffers)]
    text = f"{config.architectures} {rope} {shape.tp_rank(s)}/{shape.tp_size(s)} {rows}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
