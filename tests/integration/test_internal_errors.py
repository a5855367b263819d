"""An exception of the plugin on any rank ends a live server, and the next one delivers everything (`fail-stop`)."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_april.client import AprilClient, ServerLostError
from tests.integration.conftest import NORMAL, Pool
from tests.support.compare import by_key
from tests.support.live import TIMEOUT_S, LiveServer, until
from tests.support.workload import prompt

PARAMS = {"temperature": 0.8}
LENGTH = 300
GENERATE = {"input_ids": [9, 8, 7], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
SHORT = {"input_ids": [9, 8], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
ATTACHED = {"custom_params": {"x-april-run": "agents"}, "ignore_eos": True}
SHORT_ATTACHED = {"input_ids": [9, 8], "sampling_params": {"max_new_tokens": 3, **ATTACHED}}
ASKED: dict[str, Any] = {
    "rid": "asked",
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": LENGTH, "sampling_seed": 3, **PARAMS, **ATTACHED},
    "return_logprob": True,
}
"""An attached request, which is asked again after each restart."""
# process and function (tests/support/faults.py), the handler that the sentence names, the call that reaches it
ONE_RANK = [
    ("rank 0", "detach", "receive_message", ("/april/push/begin", {})),
    ("rank 0", "row seeds", "sampling_filter", ("/generate", SHORT)),
    ("rank 0", "journal thread", "thread april-journal", ("/april/rollout", {"run": "empty", "prompts": []})),
    ("the HTTP process", "event", "receive_event", ("/april/push/begin", {})),
]
TWO_RANKS = [
    ("rank 1", "detach", "flush_request", ("/flush_cache", {})),
    ("rank 0", "progress", "count_finishes", ("/generate", SHORT)),
    ("rank 1", "attached", "begin_attached", ("/generate", SHORT_ATTACHED)),
]
Fault = tuple[str, str, str, tuple[str, dict[str, Any]]]


@pytest.fixture
def start(pool: Pool, models: Callable[[str, int], Path], tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    """Starts a server with a journal that no other test uses."""
    started: list[LiveServer] = []

    def start(name: str, flags: list[str]) -> LiveServer:
        server = pool.get(name, [*flags, f"--april-journal={tmp_path / 'journal'}"], forked=True)
        started.append(LiveServer(server, lambda seed: models("qwen3", seed)))
        return started[-1]

    yield start
    for live in started:
        live.server.stop()


def ended_by(live: LiveServer, fault: Fault, round_: dict[str, Any]) -> None:
    """A round, a stock request, an attached one and the call that fails end with an error; so does the server, with one
    sentence."""
    server, (process, name, handler, (path, body)) = live.server, fault
    with AprilClient(server.url) as client:
        waiting = [live.in_background(client.rollout, **round_), live.in_background(server.post, "/generate", GENERATE)]
        waiting.append(live.in_background(server.post, "/generate", ASKED))
        until(lambda: server.state()["samples"]["running"] or any(w.done() for w in waiting), "the round runs")
        live.wait_decodes()
        with server.raising(process, name):
            last = live.in_background(server.post, path, body)
            until(lambda: not server.alive, "the server has ended")
        with pytest.raises(ServerLostError, match=round_["round_id"]):
            live.result_of(waiting[0])
        for request in waiting[1:]:
            with pytest.raises(httpx.TransportError):
                live.result_of(request)
        # A flush beside running requests fails; rank 0 may say so before rank 1 has ended.
        error = last.exception(TIMEOUT_S)
        assert error is None or isinstance(error, httpx.TransportError) or str(error).startswith("/flush_cache: 400")
    until(lambda: not server.processes(), "no process is left")
    log = server.log.read_text(errors="replace")
    sentences = re.findall(r"sglang-april: the server ends, because (.*) raised (.*) in (.*)\.", log)
    assert sentences == [(process, "RuntimeError('injected')", handler)]
    assert "Traceback" in log


@pytest.mark.parametrize(("name", "flags", "faults"), [
    ("fail-stop", NORMAL, ONE_RANK),
    ("fail-stop-tp2", ["--tp-size=2", "--max-total-tokens=4000"], TWO_RANKS),
])  # fmt: skip
def test_server_ends_and_its_journal_delivers_everything_once(
    start: Callable[..., LiveServer], run: str, name: str, flags: list[str], faults: list[Fault]
) -> None:
    live = start(name, flags)
    server = live.server
    prompts = [prompt(f"p{i}", LENGTH, n=2, **PARAMS) for i in range(3)]
    first = server.rollout(run=run, prompts=[*prompts, prompt("short", 12, **PARAMS)], quota=1, tier="host")
    round_ = {"run": run, "round_id": f"{run}-open", "prompts": [], "quota": None}
    with server.slowed(0.05):  # also while it starts: the round continues by itself
        for fault in faults:
            ended_by(live, fault, round_)
            assert server.process is not None
            assert server.process.wait() != 0
            server.http.close()
            server.spawn()
            server.wait()
    asked = server.post("/generate", ASKED)
    last = server.rollout(**round_)
    groups = [*first["finished"], *last["finished"]]
    delivered = sorted(key for group in groups for key in by_key([group]))
    assert delivered == [*((f"p{i}", 0, j) for i in range(3) for j in range(2)), ("short", 0, 0)]
    meta = asked["meta_info"]
    logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    output = {"output_ids": asked["output_ids"], "logprobs": logprobs, "spans": meta["april"]["spans"]}
    assert len(logprobs) == LENGTH
    groups.append({"id": "asked", "prompt_ids": ASKED["input_ids"], "samples": [{"index": 0, "seed": 3, **output}]})
    live.check(groups, {g["id"]: PARAMS for g in groups})
