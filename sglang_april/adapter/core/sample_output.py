"""The output of a sample in arrays: 8 bytes per token while it is suspended (token id int32, logprob float32).

SGLang appends to Python lists, which take 80 bytes per token together with `output_ids`. Outputs of samples are not
streamed by SGLang, so the lists are emptied into arrays whenever the output is read. Those of attached requests are
streamed from their lists by position, so they are emptied only while the request is suspended. Token ids stay with the
request while it runs (int64), because SGLang reads them.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np


class SampleOutput:
    """`Req.april_output`; an empty one is attached when SGLang creates the request."""

    __slots__ = ("_ids", "_logprobs", "_top_ids", "_top_logprobs", "_width")

    def __init__(self, top_logprobs_num: int = 0) -> None:
        self._logprobs = array("f")
        self._width = top_logprobs_num
        self._top_logprobs = array("f")
        self._top_ids = array("i")
        self._ids: array[int] | None = None
        """int32 [tokens] while the sample is suspended."""

    def collect(self, req: Any) -> None:
        """Move what SGLang has appended to the request's lists into the arrays."""
        lists = req.logprob
        if lists.output_token_logprobs_val:
            self._logprobs.extend(lists.output_token_logprobs_val)
            lists.output_token_logprobs_val.clear()
            lists.output_token_logprobs_idx.clear()
        if self._width and lists.output_top_logprobs_val:
            for values, ids in zip(lists.output_top_logprobs_val, lists.output_top_logprobs_idx, strict=True):
                self._top_logprobs.extend(values)
                self._top_ids.extend(ids)
            lists.output_top_logprobs_val.clear()
            lists.output_top_logprobs_idx.clear()

    def pack(self, req: Any) -> None:
        """Store the output compactly while the sample is suspended."""
        self.collect(req)
        self._ids = array("i", _as(req.output_ids, "<i4"))
        req.output_ids = array("q")
        req.full_untruncated_fill_ids = array("q")  # SGLang builds it again from prompt and output

    def unpack(self, req: Any) -> None:
        """Undo `pack` when the sample runs again; a no-op if it was not packed."""
        if self._ids is not None:
            req.output_ids, self._ids = array("q", _as(self._ids, "<i8")), None

    def restore(self, _req: Any, logprobs: bytes, top: list[list[tuple[float, int]]] | None) -> None:
        """After a restart: float32 [tokens], and the pairs (logprob, token id) of each token."""
        self._logprobs = array("f", logprobs)
        for row in top or ():
            self._top_logprobs.extend(value for value, _ in row)
            self._top_ids.extend(token for _, token in row)

    def logprobs(self, start: int, end: int) -> bytes:
        """float32 [end - start], of the tokens that have been collected."""
        return self._logprobs[start:end].tobytes()

    def top_logprobs(self, start: int, end: int) -> list[list[tuple[float, int]]] | None:
        """Pairs (logprob, token id) of each token; None if the request asks for none."""
        if not self._width:
            return None
        rows = (slice(i * self._width, (i + 1) * self._width) for i in range(start, end))
        return [list(zip(self._top_logprobs[row], self._top_ids[row], strict=True)) for row in rows]


class StreamedOutput(SampleOutput):
    """`Req.april_output` of an attached request, whose lists SGLang streams while it runs."""

    __slots__ = ()

    def collect(self, req: Any) -> None:
        """Copy what SGLang has appended."""
        lists = req.logprob
        self._logprobs.extend((lists.output_token_logprobs_val or [])[len(self._logprobs) :])
        if self._width and lists.output_top_logprobs_val:
            known = len(self._top_ids) // self._width
            for values, ids in zip(
                lists.output_top_logprobs_val[known:], lists.output_top_logprobs_idx[known:], strict=True
            ):
                self._top_logprobs.extend(values)
                self._top_ids.extend(ids)

    def pack(self, req: Any) -> None:
        """Empty the lists as well, and what SGLang decodes, which it builds again from prompt and output."""
        super().pack(req)
        self._set_lists(req, [], [])
        req.surr_offset, req.surr_and_decode_ids = None, array("q")

    def unpack(self, req: Any) -> None:
        """Fill the lists again: SGLang knows by their lengths what it has streamed."""
        if self._ids is not None:
            super().unpack(req)
            self._set_lists(req, req.output_ids, self.top_logprobs(0, len(req.output_ids)))

    def restore(self, req: Any, logprobs: bytes, top: list[list[tuple[float, int]]] | None) -> None:
        """Restore also the lists."""
        super().restore(req, logprobs, top)
        self._set_lists(req, req.output_ids, top)

    def _set_lists(self, req: Any, ids: Sequence[int], top: list[list[tuple[float, int]]] | None) -> None:
        """The lists of the tokens `ids`, if the request asks for logprobs."""
        if req.return_logprob:
            req.logprob.output_token_logprobs_val = self._logprobs[: len(ids)].tolist()
            req.logprob.output_token_logprobs_idx = list(ids)
            req.logprob.output_top_logprobs_val = [[value for value, _ in row] for row in top or ()]
            req.logprob.output_top_logprobs_idx = [[token for _, token in row] for row in top or ()]


def _as(ids: "array[int]", kind: str) -> bytes:
    return np.frombuffer(ids, f"<i{ids.itemsize}").astype(kind).tobytes()
