"""Fixtures and helpers of the cases for AReaL."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from areal.api import ModelRequest, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.utils import name_resolve, names

from sglang_april.integrations.areal import SGLangEngine
from tests.support.live import LiveServer, until

IDS = [9, 8, 7, 6, 5]


@pytest.fixture
def config(tmp_path: Path) -> InferenceEngineConfig:
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path / "names")))
    return InferenceEngineConfig(
        backend="sglang:d1", experiment_name="e", trial_name="t", max_concurrent_rollouts=8, consumer_batch_size=2,
        pause_grace_period=0.1, request_timeout=120, request_retries=2, setup_timeout=60,
    )  # fmt: skip


def connected(engine: Any, live: LiveServer) -> Iterator[Any]:
    """The engine while it is connected to the server."""
    engine.initialize(addr=f"127.0.0.1:{live.server.port}")
    engine.set_version(live.version)
    yield engine
    engine.destroy()


@pytest.fixture
def engine(config: InferenceEngineConfig, live: LiveServer) -> Iterator[SGLangEngine]:
    yield from connected(SGLangEngine(config), live)


@pytest.fixture
def areal_engine(config: InferenceEngineConfig, live: LiveServer) -> Iterator[RemoteSGLangEngine]:
    yield from connected(RemoteSGLangEngine(config), live)


def request(length: int = 60, **fields: Any) -> ModelRequest:
    sampling = {"max_new_tokens": length, "max_tokens": 1000, "n_samples": 1, "greedy": True, "ignore_eos": True}
    return ModelRequest(rid="t1", input_ids=list(IDS), gconfig=GenerationHyperparameters(**{**sampling, **fields}))


def begin(engine: RemoteSGLangEngine, live: LiveServer, asked: ModelRequest) -> "Future[Any]":
    """Generate in a thread with an event loop of its own; return once it decodes."""
    before = live.decodes()
    answer = live.in_background(lambda: asyncio.run(engine.agenerate(asked)))
    until(lambda: answer.done() or live.decodes() > before + 5, "the request decodes")
    assert not answer.done(), answer.result()
    return answer


def push(engine: RemoteSGLangEngine, live: LiveServer, seed: int) -> int:
    """AReaL's sequence: pause, weights from disk, the new version, continue."""
    version = engine.get_version() + 1
    live.server.loaded = live.model(seed)
    engine.pause()
    engine.pause_generation()
    meta = WeightUpdateMeta(type="disk", path=str(live.model(seed)), clear_checkpoint_after_load=False, version=version)
    name = names.update_weights_from_disk("e", "t", engine.get_version())
    name_resolve.add(name, str(time.time()), replace=True)
    engine.update_weights_from_disk(meta).result(120)
    engine.set_version(version)
    engine.continue_generation()
    engine.resume()
    live.policies[live.version] = live.model(seed)
    return version
