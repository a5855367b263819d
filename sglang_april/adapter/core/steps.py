"""What a step has done for the samples in its batch."""

from collections.abc import Iterable

from sglang.srt.managers.schedule_batch import Req

from sglang_april.scheduler.controller import Progress
from sglang_april.scheduler.state import State


def steps_of(rows: Iterable[tuple[Req, int]]) -> list[Progress]:
    """What `Controller.progress` gets for the samples among `rows`: requests, and the tokens prefilled for them.

    The lists to which SGLang appends their output are emptied, so that the step of a suspend has little to convert.
    """
    running = State.RUNNING
    steps = [
        (sample, len(req.output_ids), prefilled, req.finished_reason is not None)
        for req, prefilled in rows
        if (sample := req.april) is not None and sample.state is running and sample.request is req
    ]
    for sample, *_ in steps:
        sample.request.april_output.collect(sample.request)
    return steps
