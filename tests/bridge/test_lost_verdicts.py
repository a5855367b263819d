"""Verdicts that do not arrive are repeated by the client after connection errors; otherwise the round fails at once."""

import http.server
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_april import PROTOCOL
from sglang_april.client import AprilError, ServerLostError
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.bridge.test_engine_pool import engine_pool, request
from tests.bridge.test_rollout import FakeRolloutEngine, finished_group
from tests.bridge.test_rollout import rollout_driver as single_engine_driver
from trainer_bridge.config import Config
from trainer_bridge.rewards import Score
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.rollout_engine import RolloutEngine

TIMEOUT_S = 60.0
CONNECTION_CLOSED = ServerLostError(0, "server", "http://engine: no answer to POST /judge (RemoteProtocolError)")


@pytest.fixture
def engine() -> Iterator[FakeRolloutEngine]:
    engine = FakeRolloutEngine()
    yield engine
    engine.gone = True


def with_timeout(call: Callable[[], ScoredRollout]) -> ScoredRollout:
    """The result of the call; a call that hangs fails this test only."""
    done: Future[ScoredRollout] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised below
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(TIMEOUT_S)


class ClosesConnections(http.server.BaseHTTPRequestHandler):
    """Closes the connection on the first request of each path instead of answering."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        self._answer({"http": {"hooks": {"protocol": PROTOCOL}}})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.seen[self.path] += 1
        if self.seen[self.path] == 1:
            self.close_connection = True
        else:
            self._answer({})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_calls_of_a_round_on_a_closed_connection_are_sent_again(tmp_path: Path) -> None:
    """A server closes idle connections; the next call may be on its way."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ClosesConnections) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = Config(hf_checkpoint="m", prompt_data="d", server=f"http://127.0.0.1:{server.server_port}")
        engine = RolloutEngine(config, tmp_path, url=config.servers[0])
        engine.client.judge("r.1", accept=["a"])
        engine.client.extend("r.1", quota_add=1)
        engine.client.stop("r.1")
        engine.client.done("r", {"a": {"reward": 1.0}})
        engine.close()
        server.shutdown()
    paths = [f"/april/rounds/r.1/{call}" for call in ("judge", "extend", "stop")]
    assert ClosesConnections.seen == dict.fromkeys([*paths, "/april/trajectories/done"], 2)


@pytest.mark.parametrize("refusals", [[AprilError(500, "server", "a fault")], [CONNECTION_CLOSED]])
def test_lost_verdict_fails_the_round_without_waiting_for_the_engine(
    engine: FakeRolloutEngine, tmp_path: Path, refusals: list[Exception]
) -> None:
    """The engine waits for this verdict, so its stream would never end."""
    engine.refusals = list(refusals)
    driver = single_engine_driver(engine, tmp_path, ["ok"] * 9, over_sampling_batch_size=2, dynamic_sampling=True)
    before = driver.pool.position
    with pytest.raises(type(refusals[0])):
        with_timeout(lambda: driver.round("r.1", 2))
    assert engine.judged == len(refusals)
    assert (driver.pool.prompts, driver.pool.position) == ({}, before)


class RefusingEngine:
    """Refuses all verdicts, and streams one more group when `proceed` is set."""

    def __init__(self, groups: int) -> None:
        self.groups, self.proceed, self.read_on, self.closed = groups, *(threading.Event() for _ in range(3))

    def stream(self, **body: Any) -> Iterator[RolloutGroup | RolloutSummary]:
        try:
            for prompt in body["prompts"][: self.groups]:
                yield finished_group(prompt)
            assert self.proceed.wait(TIMEOUT_S)
            yield finished_group(body["prompts"][self.groups])
            self.read_on.set()
        finally:
            self.closed.set()

    def judge(self, round_id: str, accept: list[str], reject: list[str]) -> None:
        raise AprilError(500, "server", "a fault")


def test_lost_verdict_fails_the_round_without_waiting_for_other_rewards(tmp_path: Path) -> None:
    """The reward of the first group arrives after the second group was streamed, whose reward never arrives."""
    engine: Any = RefusingEngine(groups=2)
    driver = single_engine_driver(engine, tmp_path, ["ok"] * 9, over_sampling_batch_size=3, dynamic_sampling=True)
    first: Future[list[Score]] = Future()
    second: Future[list[Score]] = Future()

    def submit(_: Any, prompt: Any) -> "Future[list[Score]]":
        if prompt.id == "e0-0":
            return first
        threading.Timer(0.2, first.set_result, [[Score(0.0), Score(1.0)]]).start()
        return second

    driver.rewards.submit = submit  # type: ignore[method-assign]
    with pytest.raises(AprilError, match="a fault"):
        with_timeout(lambda: driver.round("r.1", 2))
    engine.proceed.set()


def test_broken_stream_fails_the_round_without_waiting_for_rewards(engine: FakeRolloutEngine, tmp_path: Path) -> None:
    """Ctrl-C, which ends the wait for events as well, would seem to do nothing until every reward has timed out."""
    engine.dies_after = 1
    driver = single_engine_driver(engine, tmp_path, ["ok"] * 9, over_sampling_batch_size=2)
    driver.rewards.submit = lambda *_: Future()  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the engine died"):
        with_timeout(lambda: driver.round("r.1", 2))


def test_stream_of_a_failed_round_is_closed(tmp_path: Path) -> None:
    """With several engines, reading on would count and stop groups of a round that may have been repeated."""
    engine: Any = RefusingEngine(groups=1)
    driver = single_engine_driver(engine, tmp_path, ["ok"] * 9, over_sampling_batch_size=3, dynamic_sampling=True)
    with pytest.raises(AprilError, match="a fault"):
        with_timeout(lambda: driver.round("r.1", 2))
    engine.proceed.set()
    assert engine.closed.wait(TIMEOUT_S)
    assert not engine.read_on.is_set()


# --- over several engines


@pytest.mark.parametrize(("usable", "delivered"), [(False, {"a1": True, "a2": False}), (True, {"a2": True})])
def test_deferred_verdict_survives_a_failed_call(usable: bool, delivered: dict[str, bool]) -> None:
    """a1 is acceptable but waits for the mandatory a2; the verdict on a2 decides both, and is lost."""
    pool, engines = engine_pool(1)
    engines[0].mandatory = {"a2"}
    judge, failures = engines[0].judge, [CONNECTION_CLOSED]

    def flaky(round_id: str, accept: Sequence[str] = (), reject: Sequence[str] = ()) -> dict[str, int]:
        if accept and failures:
            raise failures.pop()
        return judge(round_id, accept, reject)

    engines[0].judge = flaky  # type: ignore[method-assign]
    events = pool.stream(**request("r.1", "a1 a2", 1, count="accepted"))
    next(events), next(events)
    pool.judge("r.1", accept=["a1"])
    assert engines[0].verdicts == {}
    verdict = {"accept" if usable else "reject": ["a2"]}
    with pytest.raises(ServerLostError):
        pool.judge("r.1", **verdict)
    pool.judge("r.1", **verdict)
    summary = next(events)
    assert isinstance(summary, RolloutSummary)
    assert {named["id"]: named["accepted"] for named in summary.delivered} == delivered


def test_closing_an_abandoned_stream_does_not_end_the_repeated_round() -> None:
    pool, engines = engine_pool(1)
    engines[0].may_finish = 1
    body = request("r.1", "a1 a2", 2, count="accepted")
    old, new = pool.stream(**body), pool.stream(**body)
    next(old), next(new)
    old.close()  # type: ignore[attr-defined]
    pool.judge("r.1", ["a1"])
    assert engines[0].verdicts == {"a1": True}
