"""Attached requests of a server that attaches all, limits its queue, and is killed (`attached-request`)."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from tests.integration.conftest import NORMAL, OVERLAP, Pool
from tests.support.live import LiveServer, live_server, until
from tests.support.workload import prompt

pytestmark = [pytest.mark.timeout(1800), pytest.mark.ends_server]

LENGTH, INTERVAL = 300, 16
SEEDED: dict[str, Any] = {"temperature": 0.8, "sampling_seed": 41, "max_new_tokens": LENGTH, "ignore_eos": True}
UNSEEDED: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "seeded": {"input_ids": [9, 8, 7], "sampling_params": SEEDED, "return_logprob": True, "top_logprobs_num": 2},
    "unseeded": {"input_ids": [9, 8], "sampling_params": UNSEEDED, "return_logprob": True},
    "no logprobs": {"input_ids": [3, 4], "sampling_params": UNSEEDED},
    "grammar": {"input_ids": [9], "sampling_params": {**SEEDED, "regex": "[ab]{200,210}"}, "return_logprob": True},
    "other body": {"input_ids": [5, 6], "sampling_params": UNSEEDED},
}


@pytest.fixture
def journalled(
    request: pytest.FixtureRequest,
    pool: Pool,
    models: Callable[[str, int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveServer]:
    """A server with a journal of its own, on which a push prefills requests again; its parameter names the loop."""
    flags = [
        *(NORMAL if request.param == "normal" else OVERLAP),
        "--april-attach=agents",
        "--april-kv=recompute",
        "--max-running-requests=6",
        "--max-queued-requests=2",
        "--grammar-backend=llguidance",
        f"--april-journal={tmp_path_factory.mktemp('journal') / 'journal'}",
        f"--april-journal-interval={INTERVAL}",
    ]
    server = pool.get(f"attach-{request.param}", flags, forked=True)
    with live_server(server, lambda seed: models("qwen3", seed)) as live:
        yield live
    server.stop()


def _arrived(live: LiveServer) -> int:
    return int(live.server.state()["attached"].get("agents", {}).get("samples", 0))


class Streams:
    """Requests that stream, and what their clients have received."""

    def __init__(self, live: LiveServer, asked: dict[str, dict[str, Any]], others: int = 0) -> None:
        self.chunks: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
        self.done: list[Future[Any]] = []
        for name, body in asked.items():
            client = live.in_background(self._read, live, {"rid": f"rid {name}", **body}, self.chunks[name])
            self.done.append(client)
            until(lambda: _arrived(live) == others + len(self.done), "it arrives")  # one by one: the queue is short

    @staticmethod
    def _read(live: LiveServer, body: dict[str, Any], chunks: list[dict[str, Any]]) -> None:
        url = f"{live.server.url}/generate"  # no shared client: that of the server is replaced with it
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=600) as answer:
            chunks.extend(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))

    def tokens(self, name: str) -> list[int]:
        return list(self.chunks[name][-1]["output_ids"]) if self.chunks[name] else []

    def received(self) -> int:
        """Chunks of all requests: as long as some arrive, the server is slow and not stuck."""
        return sum(map(len, self.chunks.values()))

    def broken(self) -> None:
        for client in self.done:
            with pytest.raises(httpx.TransportError):
                client.result(120)

    def finish(self) -> dict[str, dict[str, Any]]:
        until(lambda: all(client.done() for client in self.done), "all are answered", self.received)
        for client in self.done:
            client.result()
        return {name: chunks[-1] for name, chunks in self.chunks.items()}


@pytest.mark.parametrize("journalled", ["normal"], indirect=True)
def test_attached_to_the_run_of_the_server(journalled: LiveServer) -> None:
    live, server = journalled, journalled.server
    requests_that_say_nothing_belong_to_the_run(live)
    the_queue_limit_is_for_new_requests(live)
    it_ends_no_sample(live)
    killed_and_asked_again(live)
    ended_and_asked_again(live)
    assert server.state()["attached"] == {}


@pytest.mark.parametrize("journalled", ["overlap"], indirect=True)
def test_killed_in_the_overlap_loop(journalled: LiveServer) -> None:
    killed_and_asked_again(journalled)


def requests_that_say_nothing_belong_to_the_run(live: LiveServer) -> None:
    """Health checks do not: they are answered while a push is open, and attached requests wait for its end."""
    server = live.server
    server.post("/april/push/begin")
    late = live.in_background(server.post, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    until(lambda: _arrived(live) == 1, "it arrives")
    assert server.http.get("/health_generate").status_code == 200
    assert not late.done()
    server.post("/april/push/end")
    assert live.result_of(late)["meta_info"]["april"]["run"] == "agents"
    live.policies[live.version] = live.model(0)


def the_queue_limit_is_for_new_requests(live: LiveServer) -> None:
    """Six run and two wait. Another one is rejected as by SGLang; those that a push prefills again are not."""
    body = {"input_ids": [1, 2], "sampling_params": {**SEEDED, "max_new_tokens": 60}}
    with live.server.slowed():
        answers = []
        for running in range(1, 7):
            answers.append(live.in_background(live.server.post, "/generate", body))
            until(lambda: live.running() == running, "it runs")  # noqa: B023
        answers += [live.in_background(live.server.post, "/generate", body) for _ in range(2)]
        until(lambda: _arrived(live) == 8, "two wait")
        rejected = live.server.http.post("/generate", json=body)
        assert (rejected.status_code, "queue is full" in rejected.text) == (503, True)
        live.push(0)
    for answer in answers:
        meta = live.result_of(answer)["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 60}
        assert meta["april"]["spans"][-1]["end"] == 60


def it_ends_no_sample(live: LiveServer) -> None:
    """Six samples are admitted in one step, where two may wait."""
    reply = live.server.rollout(run="limited", prompts=[prompt(f"p{i}", 9) for i in range(12)], quota=None)
    assert {s["finish_reason"]["type"] for g in reply["finished"] for s in g["samples"]} == {"length"}
    assert len(reply["finished"]) == 12


def killed_and_asked_again(live: LiveServer) -> None:
    """Recorded tokens stay, drawn with or without a seed; what had been answered is answered again, word for word."""
    server = live.server
    live.push(1)
    version = live.version
    short = {"rid": "rid done", "input_ids": [4], "sampling_params": {**UNSEEDED, "max_new_tokens": 20}}
    answered = server.post("/generate", {**short, "return_logprob": True})
    agents = Trajectories(live)
    with server.slowed(0.03):
        agents.begin_another()
        streams = Streams(live, ASKED)
        until(
            lambda: all(len(streams.tokens(name)) > 4 * INTERVAL for name in ASKED), "all have tokens", streams.received
        )
        server.stop()
    streams.broken()
    server.spawn()
    server.wait()
    again = {**ASKED, "other body": {**ASKED["other body"], "input_ids": [5, 7]}}
    repeated = Streams(live, again)
    assert server.state()["samples"]["running"] == 0, "the version of the weights is not known"
    body = {"model_path": str(live.model(1)), "weight_version": str(version)}
    assert server.post("/update_weights_from_disk", body)["success"]
    assert live.version == version
    answers = repeated.finish()
    for name, answer in answers.items():
        assert answer["meta_info"]["finish_reason"]["type"] != "abort", (name, answer["meta_info"])
        check_continued(streams.tokens(name), answer, version, continued=name != "other body")
    check_seeded(live, answers["seeded"])
    assert [len(row) for row in answers["seeded"]["meta_info"]["output_top_logprobs"]] == [2] * LENGTH
    assert set(answers["grammar"]["text"]) == {"a", "b"}
    assert server.post("/generate", {**short, "return_logprob": True})["output_ids"] == answered["output_ids"]
    check_answered_again(live, short, answered)
    agents.check_restored(version)


class Trajectories:
    """A round of trajectories that is open when the server is killed, and what its agents have seen."""

    ROUND: ClassVar[dict[str, Any]] = {"run": "tr", "round_id": "tr", "quota_unit": "trajectory", "quota": 2}

    def __init__(self, live: LiveServer) -> None:
        """`t0` has two legs, and `t1` is done."""
        self._live = live
        self._lost = live.in_background(self._post, "/april/rollout", self.ROUND)
        until(lambda: live.server.state()["rounds"], "the round is open")
        first = self._leg("t0", "t0-0", [7, 8, 9], 20)
        self._history = [7, 8, 9, *first["output_ids"], 5]
        self._second = self._leg("t0", "t0-1", self._history, 20)
        self._leg("t1", "t1-0", [7, 8], 10)
        self._done = {"trajectories": {"t1": {"reward": 0.5, "metadata": {"tool": "x"}}}}
        assert live.server.post("/april/rounds/tr/done", self._done)["counted"] == 1
        self._before = {name: self._record(name) for name in ("t0", "t1")}

    def _post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        answer = httpx.post(f"{self._live.server.url}{path}", json=body, headers=headers, timeout=600)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def _leg(self, name: str, rid: str, ids: list[int], length: int) -> dict[str, Any]:
        body = {"rid": rid, "input_ids": ids, "sampling_params": {**UNSEEDED, "max_new_tokens": length}}
        headers = {"x-april-run": "tr", "x-april-trajectory": name}
        return self._post("/generate", {**body, "return_logprob": True}, **headers)

    def _record(self, name: str) -> dict[str, Any]:
        return dict(self._live.server.http.get(f"/april/trajectories/{name}", params={"run": "tr"}).json())

    def begin_another(self) -> None:
        """A leg of `t2`, which the server does not end."""
        self._broken = self._live.in_background(self._leg, "t2", "t2-0", [9, 9], LENGTH)
        until(lambda: self._live.running() == 1, "it runs")

    def check_restored(self, version: int) -> None:
        """After the restart the round is open with whole records; a leg continues, and `done` is repeated."""
        for lost in (self._lost, self._broken):
            with pytest.raises(httpx.TransportError):
                lost.result(120)
        live, server = self._live, self._live.server
        assert {name: self._record(name) for name in ("t0", "t1")} == self._before
        again = self._leg("t2", "t2-0", [9, 9], LENGTH)
        recorded = again["meta_info"]["april"]["spans"][0]["end"]
        assert recorded >= 3 * INTERVAL
        assert again["meta_info"]["april"]["spans"] == [
            {"start": 0, "end": recorded, "version": version, "kv": "fresh"},
            {"start": recorded, "end": LENGTH, "version": version, "kv": "recomputed"},
        ]
        repeated = self._leg("t0", "t0-1", self._history, 20)
        assert repeated["output_ids"] == self._second["output_ids"]
        assert self._record("t0") == self._before["t0"], "the leg is not recorded twice"
        third = self._leg("t0", "t0-2", [*self._history, *self._second["output_ids"], 6], 4)
        assert self._record("t0")["branches"][0]["ids"][-4:] == third["output_ids"]
        assert server.post("/april/rounds/tr/done", self._done)["counted"] == 1
        reply = live.in_background(self._post, "/april/rollout", self.ROUND)
        server.post("/april/rounds/tr/done", {"trajectories": {"t2": {"reward": 1}}})
        ended = live.result_of(reply)
        one, two = ended["trajectories"]
        assert one == {
            key: value for key, value in self._before["t1"].items() if key not in ("state", "staleness", "tokens")
        }
        assert (one["reward"], one["metadata"]) == (0.5, {"tool": "x"})
        assert two["legs"][0]["output_ids"] == again["output_ids"]
        assert two["legs"][0]["logprobs"] == [row[0] for row in again["meta_info"]["output_token_logprobs"]]
        assert two["legs"][0]["spans"] == again["meta_info"]["april"]["spans"]
        assert [t["id"] for t in ended["carried"]["trajectories"]] == ["t0"]
        server.post("/april/drop", {"run": "tr"})


def check_continued(received: list[int], answer: dict[str, Any], version: int, *, continued: bool) -> None:
    spans, length = answer["meta_info"]["april"]["spans"], len(answer["output_ids"])
    if not continued:
        assert [(span["version"], span["kv"]) for span in spans] == [(version, "fresh")]
        return
    recorded = spans[0]["end"]
    assert spans == [
        {"start": 0, "end": recorded, "version": version, "kv": "fresh"},
        {"start": recorded, "end": length, "version": version, "kv": "recomputed"},
    ]
    assert len(received) - 2 * INTERVAL <= recorded <= len(received) + 8
    assert answer["output_ids"][:recorded][: len(received)] == received[:recorded]


def check_seeded(live: LiveServer, answer: dict[str, Any]) -> None:
    logprobs = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    spans = answer["meta_info"]["april"]["spans"]
    sample = {"index": 0, "output_ids": answer["output_ids"], "logprobs": logprobs, "spans": spans, "seed": 41}
    group = {"id": "g", "prompt_ids": ASKED["seeded"]["input_ids"], "samples": [sample]}
    live.check([group], {"g": {"temperature": 0.8}})


def check_answered_again(live: LiveServer, short: dict[str, Any], answered: dict[str, Any]) -> None:
    """Only once: the same `rid` again is another request."""
    anew = live.server.post("/generate", {**short, "return_logprob": True})
    assert len(anew["output_ids"]) == len(answered["output_ids"])
    assert anew["meta_info"]["april"]["spans"] == answered["meta_info"]["april"]["spans"]
    assert anew["output_ids"] != answered["output_ids"]


def ended_and_asked_again(live: LiveServer) -> None:
    """SIGTERM does not wait for attached requests, and their tokens are in the journal."""
    server, version = live.server, live.version
    # A name of its own: SGLang aborts the `rid` of a stream two seconds after its end (`create_abort_task`).
    asked = {"later": ASKED["seeded"]}
    text, _ = chat(live, "plain", streams=False)
    with server.slowed(0.03):
        chats = [live.in_background(chat, live, f"chat {streams}", streams=streams) for streams in (False, True)]
        until(lambda: _arrived(live) == len(chats), "they arrive")
        streams = Streams(live, asked, len(chats))
        until(lambda: len(streams.tokens("later")) > 2 * INTERVAL, "it has tokens", streams.received)
        assert server.terminate()
    streams.broken()
    for one in chats:
        with pytest.raises(httpx.TransportError):
            one.result(120)
    server.spawn()
    server.wait()
    repeated = Streams(live, asked)
    body = {"model_path": str(live.model(1)), "weight_version": str(version)}
    assert server.post("/update_weights_from_disk", body)["success"]
    answer = repeated.finish()["later"]
    check_continued(streams.tokens("later"), answer, version, continued=True)
    check_seeded(live, answer)
    for streaming in (False, True):
        again, april = chat(live, f"chat {streaming}", streams=streaming)
        assert again == text
        assert [(span["version"], span["kv"]) for span in april["spans"]] == [
            (version, "fresh"),
            (version, "recomputed"),
        ]


def chat(live: LiveServer, rid: str, *, streams: bool) -> tuple[str, dict[str, Any]]:
    """A chat completion that ends by its length: its text, and what it says of its run."""
    body = {"model": "m", "messages": [{"role": "user", "content": "1 2"}], "max_tokens": LENGTH, "temperature": 0}
    body |= {"rid": rid, "ignore_eos": True, "stream": streams}
    answer = httpx.post(f"{live.server.url}/v1/chat/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    if not streams:
        whole = answer.json()
        return whole["choices"][0]["message"]["content"], whole["metadata"]["april"][0]
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["metadata"]["april"][0]
