"""verl 0.9.1 (its wheel, unpacked) on a live server: agent loops, partial rollouts, pushes by its weight adapter."""

import pytest

from tests.support.live import LiveServer
from tests.support.packages import run_cases, unpacked

PACKAGES = [
    "verl==0.9.1",
    "accelerate==1.15.0",
    "antlr4-python3-runtime==4.9.3",
    "cachetools==8.0.2",
    "codetiming==1.4.0",
    "hydra-core==1.3.8",
    "omegaconf==2.4.0",
    "peft==0.21.2",
    "pyvers==0.2.3",
    "tensordict==0.10.0",
    "torchdata==0.11.0",
]


def test_verl(normal: LiveServer, request: pytest.FixtureRequest) -> None:
    packages = unpacked(PACKAGES, request.config.cache.mkdir("packages"))
    plugin = "sglang_april.integrations.verl.plugin"
    env = {"SGLANG_APRIL": "{}", "VERL_USE_EXTERNAL_MODULES": plugin, "VERL_LOGGING_LEVEL": "ERROR"}
    run_cases(["verl_client_cases.py", "verl_loop_cases.py"], packages, normal, env=env)
