"""Memory calls and pauses of a server, also those that a killed trainer has left."""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from trainer_bridge.config import Config
from trainer_bridge.rollout_engine import NOT_RELEASED, RolloutEngine
from trainer_bridge.validate import RunError


def external_engine(
    folder: Path, answer: Callable[[httpx.Request], httpx.Response], rounds: Sequence[str] = (), **fields: Any
) -> RolloutEngine:
    """`rounds`: ids of the open rounds."""
    config = Config(hf_checkpoint="m", prompt_data="d", server="http://x", server_start_timeout=1, **fields)
    rollout_engine = RolloutEngine(config, folder, url="http://x")
    rollout_engine._http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x")
    client: Any = SimpleNamespace(state=lambda: {"rounds": [{"round_id": name} for name in rounds]})
    rollout_engine.client = client
    return rollout_engine


def resume(folder: Path, status: int, answer: str, *tags: str) -> None:
    external_engine(folder, lambda _: httpx.Response(status, text=answer)).resume(*tags)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("rounds", [[], ["r.2"]])
def test_memory_is_released_beside_an_open_round(tmp_path: Path, rounds: list[str], in_flight: bool) -> None:
    """As after a restart that has reopened a round, while the trainer repeats earlier steps. A pause always ends.

    Without a round there is none: a stock request that would have ended waits in it, until the release is refused.
    """
    routes: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        routes.append(request.url.path)
        refused = routes[-1].startswith("/release") and (
            in_flight or (routes[0] == "/pause_generation") != bool(rounds)
        )
        return httpx.Response(400 if refused else 200, json={})

    refusal = pytest.raises(RunError, match="400") if in_flight else contextlib.nullcontext()
    with refusal:
        external_engine(tmp_path, answer, rounds).release()
    paused = ["/pause_generation", "/release_memory_occupation", "/continue_generation"]
    assert routes == (paused if rounds else paused[1:2])


class Asleep:
    """A server that a trainer has left paused, its memory released. `/health` generates a token, as SGLang's does."""

    def __init__(self, released: Sequence[str], *, starting: bool) -> None:
        self.paused, self.released, self.starting, self.alive = True, set(released), starting, True

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self.starting:
            self.starting = False
            raise httpx.ConnectError("refused")
        if path == "/resume_memory_occupation":
            tags = set(json.loads(request.content)["tags"])
            if wrong := sorted(tags - self.released):
                return httpx.Response(400, json={"error": {"message": NOT_RELEASED.format(", ".join(wrong))}})
            self.released -= tags
        elif path == "/continue_generation":
            self.alive, self.paused = self.alive and not self.released, False
        elif path == "/health":
            self.alive = self.alive and not self.released
            if self.paused:
                raise httpx.ReadTimeout("it waits for the end of the pause")
        return httpx.Response(200, json={})


@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.parametrize("released", [[], ["weights", "kv_cache", "cuda_graph"], ["kv_cache", "cuda_graph"]])
def test_a_server_whose_trainer_was_killed_is_woken_before_its_health_is_asked_for(
    tmp_path: Path, released: list[str], starting: bool
) -> None:
    """Its memory comes back before the pause ends: the prefill of a waiting request would end the server."""
    server = Asleep(released, starting=starting)
    external_engine(tmp_path, server.answer, colocate=bool(released)).wait_until_ready()
    assert server.alive
    assert not server.paused
    assert not server.released


def test_resume_is_a_no_op_for_a_server_restarted_since_the_release(tmp_path: Path) -> None:
    refusal = json.dumps({"error": {"message": NOT_RELEASED.format("cuda_graph, kv_cache")}})
    resume(tmp_path, 400, refusal, "kv_cache", "cuda_graph")
    with pytest.raises(RunError, match="cannot be resumed"):
        resume(tmp_path, 400, refusal, "weights")
    with pytest.raises(RunError, match="500"):
        resume(tmp_path, 500, refusal, "kv_cache", "cuda_graph")


@pytest.mark.parametrize("answer", ["[]", "no JSON", '{"error": "busy"}', '{"error": {"message": "busy"}}'])
def test_other_refusals_to_resume_end_the_run(tmp_path: Path, answer: str) -> None:
    with pytest.raises(RunError, match=r"resume_memory_occupation: 400"):
        resume(tmp_path, 400, answer, "weights")


def test_refusal_matches_the_message_of_the_server() -> None:
    source = Path(__file__).parents[2] / "sglang_april" / "adapter" / "core" / "hooks_http.py"
    assert NOT_RELEASED.format("{', '.join(wrong)}") in source.read_text()
    assert "sorted(_tags(obj) - released)" in source.read_text()
