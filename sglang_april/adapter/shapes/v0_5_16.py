"""SGLang 0.5.16, 0.5.17 and 0.5.18 (`interface.Shape`)."""

from typing import Any

from sglang_april.adapter.shapes.interface import Shape
from sglang_april.adapter.shapes.since_0_5_16 import Since0516
from sglang_april.adapter.shapes.until_0_5_18 import Until0518
from sglang_april.kv.kv_pages import Pages


class Release0516(Since0516, Until0518):
    DEPENDS_ON: tuple[str, ...] = (
        *Until0518.DEPENDS_ON,
        "sglang.srt.configs.hybrid_arch.mambaish_config",
        "sglang.srt.managers.schedule_batch.NextBatchPlan",
        "sglang.srt.managers.schedule_batch.ReqKvInfo",
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal",
    )

    def allocated(self, req: Any) -> int:
        return int(req.kv.kv_allocated_len)

    def give_kv(self, req: Any, pages: Pages, tree: Any) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        req.kv = ReqKvInfo(kv_allocated_len=pages.length, swa_evicted_seqlen=0)
        self._hold(req, pages, tree)

    def take_kv(self, req: Any) -> None:
        req.kv = None
        self._drop_prefix(req)


SHAPE: Shape = Release0516()
