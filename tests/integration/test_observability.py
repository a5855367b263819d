"""Metrics, dashboard, terminal view and page of a live server with a key and a journal, without --enable-metrics."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import NORMAL, Pool
from tests.support.browser import CHROMIUM, digest, opened, shown_source
from tests.support.live import until
from tests.support.server import Server
from trainer_bridge.server_process import free_port

FOLDER = Path(__file__).parents[2] / "docs" / "observability"
CONFIG = FOLDER / "prometheus.yml"
UI = Path(__file__).parents[2] / "sglang_april" / "http" / "ui.html"
KEY = "the-key"
PROMETHEUS = shutil.which("prometheus")
SUFFIXES = re.compile("_(bucket|sum|count|total)$")
ONLY_ONCE_USED = {"kv_decisions", "audited_samples"}
"""Metrics with a label of their own appear with their first event; these have none here, but are announced."""


def expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def observed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server after three rounds, of which the last left partials, and one push."""
    journal = tmp_path_factory.getbasetemp() / "observed.journal"
    flags = [*NORMAL, f"--api-key={KEY}", f"--april-journal={journal}"]
    server = pool.get("observed", flags, forked=True)
    server.http.headers["authorization"] = f"Bearer {KEY}"
    sampling = {"temperature": 1.0, "ignore_eos": True}
    for number in range(3):
        lengths = [4, 60, 90, 120]
        prompts = [
            {
                "id": f"{number}-{i}",
                "input_ids": [5, 6, 7],
                "n": 2,
                "sampling_params": {**sampling, "max_new_tokens": n},
            }
            for i, n in enumerate(lengths)
        ]
        server.rollout(run="grpo <b>1</b>", prompts=prompts, quota=2)
        if number == 1:
            server.post("/april/push/begin")
            server.post("/april/push/end")
    agents(server)
    return server


def agents(server: Server) -> None:
    """A request of a trajectory, which waits for the next round of trajectories; no test opens one."""
    headers = {"authorization": f"Bearer {KEY}"}

    def send(path: str, body: dict[str, Any], **of_request: str) -> threading.Thread:
        def request() -> None:
            with contextlib.suppress(httpx.HTTPError):  # the server ends before the last request is answered
                httpx.post(server.url + path, json=body, headers=headers | of_request, timeout=None)

        thread = threading.Thread(target=request, daemon=True)
        thread.start()
        return thread

    round_ = {"run": "agents", "round_id": "legs", "quota_unit": "trajectory", "quota": None}
    opened = send("/april/rollout", round_)
    until(lambda: server.state()["rounds"], "the round of trajectories is open")
    server.post("/april/rounds/legs/stop")
    opened.join()
    leg = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}
    send("/generate", leg, **{"x-april-run": "agents", "x-april-trajectory": "t"})
    until(lambda: server.state()["attached"], "the request of an agent waits")


def families(server: Server) -> dict[str, Any]:
    text = httpx.get(f"{server.url}/metrics").raise_for_status().text  # without a key
    return {family.name.removeprefix("sglang_april:"): family for family in text_string_to_metric_families(text)}


def test_every_metric_of_the_dashboard_exists(observed: Server) -> None:
    found = families(observed)
    named = {SUFFIXES.sub("", name) for text in expressions() for name in re.findall(r"sglang_april:(\w+)", text)}
    assert len(named) > 20
    assert named <= set(found)
    assert {name for name in named if not found[name].samples} <= ONLY_ONCE_USED
    state = {sample.labels["state"]: sample.value for sample in found["samples"].samples}
    assert state.keys() == {"queued", "running", "suspended", "finished"}
    assert state["suspended"] > 0
    tokens = {sample.labels["tier"]: sample.value for sample in found["partial_tokens"].samples}
    assert tokens.keys() == {"device", "host", "disk", "none"}
    assert sum(tokens.values()) > 0
    counts = {name: next(s.value for s in found[name].samples if s.name.endswith("_count")) for name in HISTOGRAMS}
    assert counts["round_seconds"] == 4
    assert counts["push_seconds"] == 1
    assert counts["sample_staleness"] >= 12
    assert found["attached_requests"].samples[0].value == 1
    trajectories = {sample.labels["state"]: sample.value for sample in found["trajectories"].samples}
    assert trajectories == {"undelivered": 1, "done": 0}
    assert found["journal_ok"].samples[0].value == 1
    assert found["journal_bytes"].samples[0].value > 0
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| ([^|]+) \| (?:gauge|counter|histogram)", README)))
    assert {SUFFIXES.sub("", name) for name in listed} == {name for name in found if not name.endswith("_created")}


HISTOGRAMS = ("round_seconds", "push_seconds", "sample_staleness")
README = (FOLDER / "README.md").read_text()


@contextlib.contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[httpx.Client]:
    """A Prometheus with the committed configuration, except for port and interval."""
    config = CONFIG.read_text()
    assert "localhost:30000" in config
    assert "15s" in config
    path = folder / "prometheus.yml"
    path.write_text(config.replace("localhost:30000", f"127.0.0.1:{server.port}").replace("15s", "1s"))
    port = free_port()
    options = [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    assert PROMETHEUS is not None
    command = [PROMETHEUS, f"--config.file={path}", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            yield client
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on this machine (Debian package prometheus)")
def test_a_real_prometheus_evaluates_the_dashboard(observed: Server, tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "config", str(CONFIG)], check=True, capture_output=True)
    with prometheus(observed, tmp_path) as client:

        def query(expression: str) -> Any:
            answer = client.get("/api/v1/query", params={"query": expression})
            assert answer.status_code == 200, (expression, answer.text)
            return answer.json()["data"]["result"]

        def scraped_twice() -> bool:
            try:
                if client.get("/-/ready").status_code != 200:
                    return False
            except httpx.TransportError:
                return False
            result = query("count_over_time(up{job='sglang-april'}[1m])")
            return bool(result) and float(result[0]["value"][1]) >= 3

        until(scraped_twice, "Prometheus has scraped the server three times")
        assert query("up")[0]["value"][1] == "1"
        for expression in expressions():
            filled = expression.replace("$model", ".*").replace("$instance", ".*").replace("$__rate_interval", "1m")
            used = any(name in expression for name in ONLY_ONCE_USED)
            assert query(filled) or used, expression


def test_terminal_view(observed: Server) -> None:
    command = [sys.executable, "-m", "sglang_april.top", observed.url, "--once"]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([*command, "--api-key", KEY], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    for shown in ("policy version 1", "grpo <b>1</b>", "device", "staleness", "journal ok", "quota", "agents of run"):
        assert shown in done.stdout, done.stdout
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "--api-key" in refused.stderr


def test_the_picture_in_docs_shows_the_current_page() -> None:
    command = "APRIL_SCREENSHOT=docs/observability/ui.png pytest tests/integration/test_observability.py -k page"
    assert shown_source(FOLDER / "ui.png") == digest(UI), f"with chromium installed: {command}"
    assert command in (FOLDER.parents[1] / "CONTRIBUTING.md").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian package chromium)")
def test_page_asks_for_the_key_and_shows_the_server(observed: Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(f"{observed.url}/april/ui", tmp_path / "profile") as page:
            await page.until("document.querySelector('#ask') && !document.querySelector('#ask').hidden")
            assert await page.evaluate("document.querySelector('#view').hidden")
            await type_key(page, "wrong")
            await page.until("document.querySelector('#status').textContent.includes('refuses this key')")
            await type_key(page, KEY)
            await page.until("!document.querySelector('#view').hidden")
            text = await page.evaluate("document.body.innerText")
            for shown in (
                "policy version",
                "grpo <b>1</b>",
                "device",
                "suspended",
                "KiB, 0 batches wait",
                "quota",
                "pending requests",
            ):
                assert shown in text, text
            assert await page.evaluate("document.querySelector('#last b')") is None, "names are text, not HTML"
            opening = asyncio.create_task(asyncio.to_thread(more_rounds, observed))
            await page.until("document.querySelector('#line').getAttribute('points').split(' ').length > 5")
            if target := os.environ.get("APRIL_SCREENSHOT"):
                await page.screenshot(Path(target), UI)
            await opening

    asyncio.run(scenario())


async def type_key(page: Any, key: str) -> None:
    await page.evaluate(f"document.querySelector('#key').value = {json.dumps(key)}")
    await page.evaluate("document.querySelector('#ask').requestSubmit()")


def more_rounds(server: Server) -> None:
    """Load for the line of running samples."""
    sampling = {"temperature": 1.0, "ignore_eos": True}
    with server.slowed(0.05):
        for number in range(2):
            prompts = [
                {
                    "id": f"{time.time()}-{i}",
                    "input_ids": [5],
                    "n": 2,
                    "sampling_params": {**sampling, "max_new_tokens": n},
                }
                for i, n in enumerate(range(10, 130, 10))
            ]
            server.rollout(run=f"load-{number}", prompts=prompts, quota=6)
