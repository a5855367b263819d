"""AReaL 1.0.4 (its wheel, unpacked) on a live server: its engine's requests and pushes, with attached requests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Pool
from tests.support.live import LiveServer, live_server
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


DEFAULTS = """
import json, sys
from areal.api.cli_args import SGLangConfig

# A CPU has neither FA3 nor bfloat16 kernels; the tiny model has a short context. The page asks for the prefix cache.
config = SGLangConfig(
    model_path=sys.argv[1], attention_backend=None, dtype="float32", context_length=2048, mem_fraction_static=0.6,
    disable_radix_cache=False,
)
print(json.dumps(SGLangConfig.build_cmd(config, tp_size=1, base_gpu_id=0)))
"""


@pytest.fixture
def packages(request: pytest.FixtureRequest) -> Path:
    return unpacked(PACKAGES, request.config.cache.mkdir("packages"))


@pytest.fixture
def areal_server(pool: Pool, models: Callable[[str, int], Path], packages: Path) -> Iterator[LiveServer]:
    """A server with the arguments that AReaL's default configuration gives to its launch module."""
    command = [sys.executable, "-c", DEFAULTS, str(models("qwen3", 0))]
    env = {**os.environ, "PYTHONPATH": str(packages)}
    printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    _, _, module, *flags = json.loads(printed.splitlines()[-1])
    assert module.endswith(".launch_server")
    made = pool.get("areal", [*flags, "--max-total-tokens=16000"], forked=True)
    with live_server(made, lambda seed: models("qwen3", seed)) as live:
        yield live


def test_areal(areal_server: LiveServer, packages: Path) -> None:
    run_cases(["areal_cases.py", "areal_training_cases.py"], packages, areal_server)
