"""Who raised an exception, by the log."""

from tests.support.tracebacks import Raised, raised

LOG = """
[2026-11-26 00:46:43] ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File "/v/site-packages/starlette/routing.py", line 1, in app
    await f()
  File "/src/sglang_april/adapter/core/hooks_http.py", line 40, in call
    raise
  File "/v/site-packages/sglang/srt/managers/io_struct.py", line 446, in _handle_parallel_sampling
    x
TypeError: no
[2026-11-26 00:46:43] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 500 Internal Server Error
[2026-11-26 00:46:44] Error in request: x
Traceback (most recent call last):
  File "/v/site-packages/sglang/srt/a.py", line 1, in f
    g()
  File "/src/sglang_april/http/rounds.py", line 1, in g
    x
KeyError: 1
[2026-11-26 00:46:45] TokenizerManager hit an exception: Traceback (most recent call last):
  File "/v/site-packages/sglang/srt/b.py", line 1, in h
"""


def test_the_innermost_frame_counts() -> None:
    assert raised(LOG) == {Raised("sglang", "_handle_parallel_sampling"): 1, Raised("sglang_april", "g"): 1}
    assert not raised("")
