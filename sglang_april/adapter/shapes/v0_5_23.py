"""SGLang 0.5.23 (`interface.Shape`).

`ServerArgs` keeps what the user gave, beside what SGLang has decided. Weights are sent in tensors or over a group only
in a session. Its KV: `kv_0_5_23`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang_april.adapter.shapes import tables_0_5_23 as tables
from sglang_april.adapter.shapes.interface import Argument, Shape
from sglang_april.adapter.shapes.kv_0_5_23 import Kv0523
from sglang_april.adapter.shapes.since_0_5_16 import Since0516

if TYPE_CHECKING:
    import torch


class Release0523(Kv0523, Since0516):
    DEPENDS_ON, TARGETS, HOOKS = tables.DEPENDS_ON, tables.TARGETS, tables.HOOKS

    # --- arguments

    def arguments(self, args: Any) -> Iterator[Argument]:
        import msgspec
        from sglang.srt.arg_groups.arg_utils import record_fields, with_fallback
        from sglang.srt.arg_groups.overrides import resolution_result

        for field in record_fields(type(args)):
            factory = field.default_factory
            default = field.default if factory is msgspec.NODEFAULT else factory()
            yield Argument(
                field.name, resolution_result(args, field.name), with_fallback(type(args), field.name, default)
            )

    def resolved(self, args: Any) -> Any:
        from sglang.srt.arg_groups.model_override_base import resolving_view

        return resolving_view(args)

    def model_config(self, args: Any) -> Any:
        from sglang.srt.arg_groups.model_override_base import model_config_of

        return model_config_of(args)

    # --- the scheduler

    def tp_rank(self, _s: Any) -> int:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)

    def tp_size(self, _s: Any) -> int:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_size)

    def may_clear(self, manager: Any, s: Any) -> bool:
        return bool(manager.is_fully_idle(ignore_waiting=s._engine_paused))

    def beam_rows(self, s: Any, reqs: Iterable[Any]) -> int:
        if not s.beam_coordinator._num_live_groups:
            return 0
        return sum(req.beam_group.num_member_rows for req in reqs if req.beam_group is not None)

    def in_flight(self, s: Any) -> Iterable[Any]:
        reqs: Iterable[Any] = s.collect_inflight_reqs()
        return reqs

    def remove(self, batch: Any, reqs: Sequence[Any]) -> None:
        batch.filter_batch(reqs_to_exclude=list(reqs))

    # --- weights

    def record_label(
        self, original: Callable[..., None], s: Any, label: str | None, suspended: Iterable[tuple[Any, int]]
    ) -> None:
        from sglang.srt.runtime_context import get_serving
        from sglang.srt.utils.weight_versions import WeightVersionEvent

        old = get_serving().weight_version
        original(s, label)
        if get_serving().weight_version != old:
            for req, length in suspended:
                req.weight_version_events.append(WeightVersionEvent(old, length))

    @contextlib.contextmanager
    def weight_session(self, manager: Any, recv_req: Any, *, keep: bool) -> Iterator[None]:
        needed = type(recv_req).__name__ in ("UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput")
        if not needed or manager._session is not None:
            yield
            return
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _unhooked("begin_weight_update")(manager, BeginWeightUpdateReqInput())
        try:
            yield
        finally:
            if not keep:
                _end(manager)

    def end_weight_session(self, s: Any) -> None:
        if s.weight_updater._session is not None:
            _end(s.weight_updater)

    # --- forwards

    def sampled(self, tokens: "torch.Tensor", stock: Any = None) -> Any:
        return tokens, None if stock is None else stock[1]

    def tokens_of(self, stock: Any) -> "torch.Tensor":
        tokens: torch.Tensor = stock[0]
        return tokens


def _end(manager: Any) -> None:
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    _unhooked("end_weight_update")(manager, EndWeightUpdateReqInput())


def _unhooked(name: str) -> Any:
    """SGLang's method: the hooks are for sessions that clients open and end."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    method = getattr(SchedulerWeightUpdaterManager, name)
    return getattr(method, "__wrapped__", method)


SHAPE: Shape = Release0523()
