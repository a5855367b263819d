"""AReaL's inference engine on a live server. Run by tests/integration/test_areal.py."""

import asyncio
from typing import Any

import pytest
from areal.engine.sglang_remote import RemoteSGLangEngine

from sglang_april.integrations.areal import Backend, SGLangEngine
from tests.frameworks.areal_fixtures import IDS, begin, push, request
from tests.support.live import LiveServer

pytest_plugins = ("tests.frameworks.areal_fixtures",)


def check(live: LiveServer, response: Any, first: int, *, kv: str) -> None:
    """Assert that the tokens of both versions are those that a replay draws."""
    versions = response.output_versions
    drawn = versions.count(first)
    assert versions == [first] * drawn + [first + 1] * (60 - drawn)
    assert 0 < drawn < 60
    spans = [
        {"start": 0, "end": drawn, "version": first, "kv": "fresh"},
        {"start": drawn, "end": 60, "version": first + 1, "kv": kv},
    ]
    sample = {"index": 0, "output_ids": response.output_tokens, "logprobs": response.output_logprobs, "spans": spans}
    live.check([{"id": "r", "prompt_ids": IDS, "samples": [{**sample, "seed": 0}]}], {"r": {"temperature": 0}})


def test_versions_of_every_token_are_exact(engine: SGLangEngine, live: LiveServer) -> None:
    """A push in the middle of a request: it is suspended, resumes on its KV, and its caller sends nothing again."""
    first = live.version
    with live.server.slowed(0.05):
        answer = begin(engine, live, request())
        prefills = sum(not row["decode"] for row in live.server.forwards())
        push(engine, live, 1)
    response = live.result_of(answer)
    assert live.version == first + 1 == engine.get_version()
    assert (response.stop_reason, response.input_tokens) == ("length", IDS)
    assert sum(not row["decode"] for row in live.server.forwards()) == prefills
    check(live, response, first, kv="kept")


def test_areals_own_engine_prefills_again(areal_engine: RemoteSGLangEngine, live: LiveServer) -> None:
    """The same push with AReaL's engine on the same server: the request ends, and prompt and tokens are sent again."""
    first = live.version
    with live.server.slowed(0.05):
        answer = begin(areal_engine, live, request())
        prefills = sum(not row["decode"] for row in live.server.forwards())
        push(areal_engine, live, 1)
    check(live, live.result_of(answer), first, kv="recomputed")
    assert sum(not row["decode"] for row in live.server.forwards()) == prefills + 1


def test_several_requests_at_once_keep_their_own_versions(engine: SGLangEngine, live: LiveServer) -> None:
    async def all_of() -> list[Any]:
        return await asyncio.gather(*(engine.agenerate(request(length)) for length in (5, 9, 13)))

    responses = asyncio.run(all_of())
    assert [len(response.output_versions) for response in responses] == [5, 9, 13]
    assert {version for response in responses for version in response.output_versions} == {live.version}


def test_defaults_of_areal_are_accepted(engine: SGLangEngine, live: LiveServer) -> None:
    """`top_k` of a hundred million means all tokens; a penalty of zero is none."""
    response = asyncio.run(engine.agenerate(request(6, greedy=False, temperature=1.0)))
    assert len(response.output_tokens) == 6
    request_of = engine._engine.backend.build_generation_request(request(6), with_lora=False, version=0)
    assert request_of.payload["sampling_params"]["top_k"] == -1
    assert "frequency_penalty" not in request_of.payload["sampling_params"]


def test_an_aborted_request_is_continued(engine: SGLangEngine, live: LiveServer) -> None:
    """`abort_all` of another client ends attached requests, too: AReaL's loop sends the tokens again."""
    with live.server.slowed(0.05):
        answer = begin(engine, live, request())
        live.server.post("/abort_request", {"abort_all": True})
    response = live.result_of(answer)
    assert len(response.output_tokens) == len(response.output_versions) == 60


def test_requests_that_cannot_be_attached_are_areals_own() -> None:
    backend = Backend()
    asked = request(6)
    asked.metadata["return_routed_experts"] = True
    assert "custom_params" not in backend.build_generation_request(asked, False, 0).payload["sampling_params"]


def test_launch_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """AReaL's own arguments, with the launcher of sglang-april."""
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: commands.append(command))
    Backend().launch_server({"model_path": "m", "host": "127.0.0.1", "port": 1, "disable_radix_cache": False})
    assert commands == [
        ["python3", "-m", "sglang_april.launch_server", "--model-path", "m", "--host", "127.0.0.1", "--port", "1"]
    ]
