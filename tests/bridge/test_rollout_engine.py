"""A server of the run's own: started, found again after its trainer's death, buried after its own."""

import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.live import until
from trainer_bridge.checkpoints import Checkpoints, LoopState
from trainer_bridge.cli import main
from trainer_bridge.config import Config
from trainer_bridge.rollout_engine import NOT_RELEASED, RolloutEngine, RolloutEngines
from trainer_bridge.server_process import EngineGoneError, EngineLostError, LocalServerProcess
from trainer_bridge.validate import RunError

SERVES = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def engine(folder: Path, code: str = SERVES, **fields: object) -> RolloutEngine:
    """An engine whose server is a few lines of Python."""
    made = RolloutEngine(Config(hf_checkpoint="m", prompt_data="d", **fields), folder)  # type: ignore[arg-type]
    made._command = lambda: [sys.executable, "-c", code, made.url.rpartition(":")[2]]  # type: ignore[method-assign]
    return made


def pid(folder: Path) -> int:
    return int(json.loads((folder / "server.json").read_text())["pid"])


def test_a_trainers_successor_takes_over_its_server(tmp_path: Path) -> None:
    first = engine(tmp_path)
    first.ready()
    server = pid(tmp_path)
    second = engine(tmp_path)  # the first one was killed, and ended nothing
    second.ready()
    assert (second.url, pid(tmp_path)) == (first.url, server)
    second.close()
    assert first._own is not None
    assert not first._own.alive
    assert not (tmp_path / "server.json").exists()


def test_a_killed_server_is_started_again_at_its_address(tmp_path: Path) -> None:
    made = engine(tmp_path)
    made.ready()
    server = pid(tmp_path)
    os.killpg(server, signal.SIGKILL)
    own = made._own
    assert own is not None
    until(lambda: not own.alive, "the end of the server")
    made.ready()
    assert pid(tmp_path) != server
    made.close()


def test_a_number_that_is_used_again_is_no_server_of_ours(tmp_path: Path) -> None:
    record = {"pid": os.getpid(), "began": 1.0, "url": "http://127.0.0.1:1"}
    (tmp_path / "server.json").write_text(json.dumps(record))
    own = LocalServerProcess(tmp_path / "server.json")
    assert own.url is None
    assert not own.alive
    own.end()


def test_a_server_that_ends_at_its_start_is_lost_and_its_log_named(tmp_path: Path) -> None:
    made = engine(tmp_path, "raise SystemExit(3)")
    with pytest.raises(EngineLostError, match=r"server\.log"):
        made.ready()
    made.close()


def test_a_server_that_was_given_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    config = Config(hf_checkpoint="m", prompt_data="d", server="http://127.0.0.1:9", server_start_timeout=0.01)
    made = RolloutEngines(config, tmp_path)
    with pytest.raises(EngineGoneError, match=r"127\.0\.0\.1:9 does not serve within 0.01 s"):
        made.ready()
    made.close()


def test_a_server_of_ours_keeps_a_journal_unless_told_otherwise(tmp_path: Path) -> None:
    def flags(**fields: object) -> list[str]:
        made = RolloutEngine(Config(hf_checkpoint="m", prompt_data="d", **fields), tmp_path)  # type: ignore[arg-type]
        return [flag for flag in made._command() if "journal" in flag]

    assert flags() == [f"--april-journal={tmp_path / 'server.journal'}"]
    assert flags(server_flags=["--april-journal=/x"]) == ["--april-journal=/x"]
    assert flags(server_journal=False) == []


def resumed(folder: Path, status: int, answer: str, *tags: str) -> None:
    made = RolloutEngine(Config(hf_checkpoint="m", prompt_data="d", server="http://x"), folder, url="http://x")
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=answer))
    made._http = httpx.Client(transport=transport, base_url="http://x")
    made.resume(*tags)


def test_a_server_that_was_started_again_since_the_release_has_its_memory(tmp_path: Path) -> None:
    said = json.dumps({"error": {"message": NOT_RELEASED.format("cuda_graph, kv_cache")}})
    resumed(tmp_path, 400, said, "kv_cache", "cuda_graph")
    with pytest.raises(RunError, match="cannot be resumed"):
        resumed(tmp_path, 400, said, "weights")
    with pytest.raises(RunError, match="500"):
        resumed(tmp_path, 500, said, "kv_cache", "cuda_graph")


@pytest.mark.parametrize("answer", ["[]", "no JSON", '{"error": "busy"}', '{"error": {"message": "busy"}}'])
def test_any_other_refusal_to_resume_ends_the_run(tmp_path: Path, answer: str) -> None:
    with pytest.raises(RunError, match=r"resume_memory_occupation: 400"):
        resumed(tmp_path, 400, answer, "weights")


def test_the_refusal_is_the_one_that_servers_speak() -> None:
    source = Path(__file__).parents[2] / "sglang_april" / "adapter" / "v0_5_17" / "hooks_http.py"
    assert NOT_RELEASED.format("{', '.join(wrong)}") in source.read_text()
    assert "sorted(_tags(obj) - released)" in source.read_text()


def test_a_run_that_is_cut_off_says_why_and_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class CutOff:
        def __init__(self, _: Config) -> None:
            self.store = Checkpoints(tmp_path, 1)

        def run(self) -> None:
            self.store.save(LoopState(step=4), lambda _: None)
            raise EngineGoneError("the server at http://x does not serve within 9 s")

        def close(self) -> None:
            (tmp_path / "closed").touch()

    monkeypatch.setattr("trainer_bridge.loop.TrainingLoop", CutOff)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["--hf-checkpoint", "m", "--prompt-data", "d"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "april-train: the server at http://x does not serve within 9 s. The same command goes on after step 4."
    ]
    assert (tmp_path / "closed").exists()
