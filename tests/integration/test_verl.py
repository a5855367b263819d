"""verl 0.9.1 (its wheel, unpacked) on a live server: agent loops, partial rollouts, pushes by its weight adapter."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import NORMAL, Pool
from tests.support.live import LiveServer, live_server
from tests.support.packages import run_cases, run_own_tests, unpacked

PACKAGES = [
    "verl==0.9.1",
    "accelerate==1.15.0",
    "antlr4-python3-runtime==4.9.3",
    "cachetools==8.0.2",
    "codetiming==1.4.0",
    "hydra-core==1.3.8",
    "omegaconf==2.4.0",
    "peft==0.21.2",
    "pytest-asyncio==1.5.0",
    "pyvers==0.2.3",
    "tensordict==0.10.0",
    "torchdata==0.11.0",
    "transferqueue==0.1.11",
]


ENV = {"SGLANG_APRIL": "{}", "VERL_USE_EXTERNAL_MODULES": "sglang_april.integrations.verl.plugin"}
QUIET = {**ENV, "VERL_LOGGING_LEVEL": "ERROR"}


@pytest.fixture
def packages(request: pytest.FixtureRequest) -> Path:
    return unpacked(PACKAGES, request.config.cache.mkdir("packages"))


@pytest.fixture
def no_tokenizer(pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    """verl's default: `skip_tokenizer_init`."""
    server = pool.get("no-tokenizer", [*NORMAL, "--skip-tokenizer-init"], forked=True)
    with live_server(server, lambda seed: models("qwen3", seed)) as live:
        yield live


def test_clients_and_v1(no_tokenizer: LiveServer, packages: Path) -> None:
    run_cases(["verl_client_cases.py", "verl_v1_cases.py"], packages, no_tokenizer, env=QUIET)


def test_agent_loops(normal: LiveServer, packages: Path) -> None:
    """On a server with a tokenizer, because the tool calls of a tiny model need a grammar."""
    run_cases(["verl_loop_cases.py"], packages, normal, env=QUIET)


WITH_PLUGIN = """
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from sglang_april.integrations.verl import agent_loop, agent_loop_tq, weights

assert _ROLLOUT_REGISTRY["sglang", "async"] == "sglang_april.integrations.verl.weights.ServerAdapter"
"""


def test_verls_own_tests_with_the_plugin(packages: Path, tmp_path: Path) -> None:
    """Those that verl runs on a CPU, without those of its Ray workers."""
    (tmp_path / "conftest.py").write_text(WITH_PLUGIN)
    run_own_tests("verl", r"tests/(?!single_controller/).*_on_cpu\.py", packages, tmp_path, env=ENV)
