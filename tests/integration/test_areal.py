"""AReaL 1.0.4 (its wheel, unpacked) on a live server: its engine's requests and pushes, with attached requests."""

import pytest

from tests.support.live import LiveServer
from tests.support.packages import run_cases, unpacked

PACKAGES = [
    "areal==1.0.4",
    "aiofiles==25.1.0",
    "antlr4-python3-runtime==4.9.3",
    "blinker==1.9.0",
    "colorlog==6.12.0",
    "flask==3.1.3",
    "hydra-core==1.3.8",
    "itsdangerous==2.2.0",
    "omegaconf==2.4.0",
    "tenacity==9.2.1",
    "torchdata==0.11.0",
    "werkzeug==3.1.9",
]


def test_areal(normal: LiveServer, request: pytest.FixtureRequest) -> None:
    packages = unpacked(PACKAGES, request.config.cache.mkdir("packages"))
    run_cases(["areal_cases.py"], packages, normal)
