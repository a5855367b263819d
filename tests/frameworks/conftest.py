"""The live server that the starting test has described (tests/support/packages.py)."""

import json
import os
from pathlib import Path

import httpx
import pytest

from tests.support.live import LiveServer
from tests.support.server import Server


@pytest.fixture
def live() -> LiveServer:
    given = json.loads(os.environ["APRIL_TEST_SERVER"])
    models = [Path(path) for path in given["models"]]
    server = Server("given", models[0], [], Path(given["folder"]), port=given["port"])
    server.http = httpx.Client(base_url=server.url, timeout=180)
    made = LiveServer(server, lambda seed: models[seed])
    made.push(0)
    return made
