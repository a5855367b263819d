"""SIGTERM on a live server with a journal and a disk tier, kills while it shuts down, and kills of running samples."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sglang_april.client import AprilClient
from tests.integration.conftest import NORMAL, Pool
from tests.support.background import BackgroundRound
from tests.support.compare import assert_near, by_key, stock_noise
from tests.support.live import until
from tests.support.server import Server
from tests.support.workload import prompt
from trainer_bridge.server_process import last_error

LENGTH = 300
EVERY = 16
"""Tokens between two records of a running sample."""


@pytest.fixture
def journalled(pool: Pool, tmp_path: Path) -> Iterator[Server]:
    """A server with an empty journal that no other test shares."""
    server = pool.get(
        "shutdown",
        [*NORMAL, f"--april-journal={tmp_path / 'journal'}", f"--april-journal-interval={EVERY}"],
        forked=True,
    )
    yield server
    server.stop()


def leave(server: Server, run: str) -> dict[tuple[str, int], int]:
    """Partials on the device and on the host; their tokens by (id, index)."""
    for tier in ("device", "host"):
        prompts = [prompt(f"{tier}-long", LENGTH, n=3, temperature=1.0), prompt(f"{tier}-short", 20)]
        server.rollout(run=f"{run}-{tier}", prompts=prompts, quota=1, tier=tier)
    until(lambda: not server.state()["store"]["in_flight"], "the copies have ended")
    found = [p for tier in ("device", "host") for p in server.partials(f"{run}-{tier}")]
    assert {p["tier"] for p in found} == {"device", "host"}
    return {(p["id"], p["index"]): p["tokens"] for p in found}


def end(server: Server, *signals: int) -> None:
    """Send the signals to all processes of the server and wait until these have ended."""
    assert server.process is not None
    for number in signals:
        os.killpg(server.process.pid, number)
    until(lambda: ended(server), "the server ends")
    server.stop()


def ended(server: Server) -> bool:
    assert server.process is not None
    try:
        os.killpg(server.process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def restart(server: Server) -> None:
    server.spawn()
    server.wait()


def test_a_restart_after_sigterm_resumes_on_the_disk(
    journalled: Server, models: Callable[[str, int], Path], tmp_path: Path, run: str
) -> None:
    server = journalled
    before = leave(server, run)
    requested = {"run": f"{run}-open", "round_id": f"{run}-open", "prompts": [prompt("open", LENGTH, n=2)], "quota": 1}
    with server.slowed():
        waiting = BackgroundRound(server, **requested)
        until(lambda: server.state()["samples"]["running"] == 2, "the round runs")
        end(server, signal.SIGTERM)
        refused = waiting.reply(503)
    assert refused["error"]["field"] == "shutdown"
    assert "shutting down; after a restart" in refused["error"]["reason"]
    log = server.log.read_text()
    assert "april: shut down in" in log
    assert "cut short" not in log
    assert "not everything was stored" not in log
    assert not (tmp_path / "journal-wal").exists(), "the journal is not closed"

    restart(server)
    found = [p for tier in ("device", "host") for p in server.partials(f"{run}-{tier}")]
    assert {(p["id"], p["index"]): p["tokens"] for p in found} == before
    assert {p["tier"] for p in found} == {"disk"}
    again = server.post("/april/rollout", requested)
    assert (again["stats"]["resumed_kept"], again["stats"]["resumed_recomputed"]) == (2, 0)
    server.push(models("qwen3", 1))
    for tier in ("device", "host"):
        reply = server.rollout(run=f"{run}-{tier}", prompts=[], quota=None)
        stats = reply["stats"]
        assert (stats["resumed_kept"], stats["resumed_recomputed"], stats["reprefilled_tokens"]) == (3, 0, 0)
        for (name, _, index), sample in by_key(reply["finished"]).items():
            spans = [(span["start"], span["version"], span["kv"]) for span in sample["spans"]]
            assert spans == [(0, 0, "fresh"), (before[name, index], 1, "kept")]


@pytest.mark.parametrize("second", [signal.SIGKILL, signal.SIGTERM])
def test_a_shutdown_that_is_cut_short_loses_nothing(journalled: Server, run: str, second: int) -> None:
    server = journalled
    before = leave(server, run)
    end(server, signal.SIGTERM, second)
    restart(server)
    found = [p for tier in ("device", "host") for p in server.partials(f"{run}-{tier}")]
    assert {(p["id"], p["index"]): p["tokens"] for p in found} == before
    for tier in ("device", "host"):
        groups = server.drain(f"{run}-{tier}")
        assert [len(s["output_ids"]) for g in groups for s in g["samples"]] == [LENGTH] * 3


def test_a_client_that_repeats_calls_survives_a_restart(journalled: Server, run: str) -> None:
    server = journalled
    body = {"run": run, "round_id": run, "prompts": [prompt("open", LENGTH, n=2)], "quota": 1}
    with AprilClient(server.url, retry_s=120) as client, ThreadPoolExecutor() as threads:
        with server.slowed():
            streamed = threads.submit(lambda: list(client.stream(**body)))
            until(lambda: server.state()["samples"]["running"] == 2, "the round runs")
            end(server, signal.SIGTERM)
        restart(server)
        *_, summary = streamed.result(120)
    assert [len(sample.output_ids) for group in summary.groups for sample in group.samples] == [LENGTH] * 2


def test_ctrl_c_stores_as_sigterm_does_and_names_what_is_kept(journalled: Server, run: str) -> None:
    """Not even a request of SGLang's own that still runs delays it, and no process prints a traceback."""
    server = journalled
    before = leave(server, run)
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    with server.slowed(), ThreadPoolExecutor() as threads:
        threads.submit(httpx.post, f"{server.url}/generate", json=body, timeout=120)
        until(lambda: server.state()["pool"]["running"] > 0, "the request runs")
        end(server, signal.SIGINT)
    log = server.log.read_text()
    assert "Traceback" not in log
    last_line = "sglang-april: interrupted. The journal "
    assert log.splitlines()[-1].startswith(last_line), log[-2000:]
    restart(server)
    found = [p for tier in ("device", "host") for p in server.partials(f"{run}-{tier}")]
    assert {(p["id"], p["index"]): p["tokens"] for p in found} == before
    assert {p["tier"] for p in found} == {"disk"}


def test_ctrl_c_during_the_start_ends_all_processes(models: Callable[[str, int], Path], tmp_path: Path) -> None:
    server = Server("starting", models("qwen3", 0), [*NORMAL, f"--april-journal={tmp_path / 'journal'}"], tmp_path)
    server.spawn()
    assert isinstance(server.process, subprocess.Popen)
    until(lambda: len(server.processes()) > 2, "the schedulers start")
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(60) == 130
    until(lambda: ended(server), "all processes have ended")
    lines = server.log.read_text().splitlines()
    assert "Traceback (most recent call last):" not in lines
    assert lines[-1].startswith("sglang-april: interrupted. The journal "), lines[-5:]


def test_a_kill_redraws_few_tokens_and_none_that_a_stream_has_shown(journalled: Server, run: str) -> None:
    """Running samples restart from their last periodic record; penalties and seeds continue as without the kill."""
    server = journalled
    params = {"plain": {"temperature": 1.0}, "greedy": {"temperature": 0}, "repetition": {"repetition_penalty": 1.3}}
    prompts = [prompt(name, LENGTH, n=2, **given) for name, given in params.items()]
    wanted = by_key(server.rollout(run=f"{run}-wanted", prompts=prompts, quota=None)["finished"])
    requested = {"run": run, "round_id": run, "prompts": [*prompts, prompt("short", 5 * EVERY)], "quota": None}
    streamed = {**requested, "stream": True, "previews": True}
    with (
        server.slowed(0.02),
        httpx.stream("POST", f"{server.url}/april/rollout", json=streamed, timeout=120) as stream,
    ):
        shown = json.loads(next(stream.iter_lines()))
        end(server, signal.SIGKILL)
    assert shown["id"] == "short"
    restart(server)
    reply = server.post("/april/rollout", requested)
    samples = by_key(reply["finished"])
    short = samples.pop(("short", 0, 0))
    assert all(short[name] == value for name, value in shown["samples"][0].items())
    for sample in samples.values():
        start = sample["spans"][-1]["start"]
        assert sample["spans"][-1]["kv"] == "recomputed"
        assert 4 * EVERY <= start <= LENGTH - EVERY, "it was running, and is not drawn from its beginning"
    for name in params:
        one, other = ({k: s for k, s in group.items() if k[0] == name} for group in (samples, wanted))
        assert_near(one, other, stock_noise(server), seeded=name != "greedy")


def test_a_journal_of_another_model_is_refused(
    journalled: Server, models: Callable[[str, int], Path], run: str
) -> None:
    """The start ends with one sentence that names both models, and the journal is as it was."""
    server, model = journalled, journalled.model
    server.rollout(run=run, prompts=[prompt("short", 4), prompt("long", 60)], quota=1)
    end(server, signal.SIGTERM)
    server.model = models("llama", 0)
    server.spawn()
    with pytest.raises(RuntimeError, match="did not come up"):
        server.wait()
    names = f"architecture Qwen3ForCausalLM in {model} and LlamaForCausalLM in {server.model}"
    sentence = f"belongs to another model: {names}; start with that model"
    assert sentence in server.log.read_text()
    assert "Traceback" not in server.log.read_text().rpartition(sentence)[2]
    assert sentence in last_error(server.log), "what april-train reports"
    server.model = model
    server.spawn()
    server.wait()
    server.push(model)
    assert [g["id"] for g in server.drain(run)] == ["long"]
