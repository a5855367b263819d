"""Finished samples for tests of the audit."""

from typing import Any

import numpy as np

from sglang_april.api import messages

Spans = list[tuple[int, int, int, str]]


def finished(spans: Spans, prompt_len: int = 3, rescore: float | str = 1.0, logprobs: Any = None) -> Any:
    length = spans[-1][1]
    values = np.linspace(-1, -0.1, length, dtype="<f4") if logprobs is None else np.asarray(logprobs, "<f4")
    given = messages.Prompt("p", np.arange(1, prompt_len + 1, dtype="<i4").tobytes(), 1, 0, 0, rescore=rescore)
    sample = messages.FinishedSample(
        run="r",
        id="p",
        incarnation=0,
        index=0,
        output_ids=np.arange(10, 10 + length, dtype="<i4").tobytes(),
        logprobs=values.tobytes(),
        spans=[messages.Span(*span) for span in spans],
        finish_reason={"type": "stop"},
        seed=0,
    )
    return sample, given
