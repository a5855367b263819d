"""Fixtures for rollouts of slime's kind: the trainer's own modules, and its arguments.

CI runs them with miles, slime's fork, whose wheel is unpacked and not installed: it has packages of SGLang in it. With
`SLIME_PATH`, the path of a checkout, they run with slime as well.
"""

import importlib
import json
import os
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_april.integrations.framework import Framework
from tests.support.live import LiveServer
from tests.support.packages import pip, unpacked
from tests.support.router import PACKAGES, Router

MILES = "miles-rl==0.0.2"
FUNCTIONS = "tests.integration.slime_functions."
STOPS = list(range(6, 70))
"""One token in eight ends a response, so lengths differ."""
Rollout = Callable[..., Any]
"""A rollout function as the trainer calls it."""


@contextmanager
def imported(package: str, factory: pytest.TempPathFactory) -> Iterator[Framework]:
    """The trainer's modules, from a checkout or from the wheel of miles; without them the test is skipped."""
    folder = Path(os.environ.get(f"{package.upper()}_PATH", ""))
    if folder == Path() and package == "slime":
        pytest.skip("SLIME_PATH names no checkout of slime, which has no package")
    if folder == Path():
        folder = factory.mktemp("miles")
        pip("download", "--dest", str(folder), MILES)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("miles/")])
    sys.path.insert(0, str(folder))
    yield Framework(package)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module", params=["miles", "slime"])
def framework(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    with imported(request.param, tmp_path_factory) as made:
        yield made


@pytest.fixture
def args(normal: LiveServer, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """The trainer's arguments for rollouts on one server."""
    monkeypatch.setenv("SGLANG_APRIL_RUN", run)
    with Router([normal.server.url]) as router:
        yield trainer_args(tmp_path, normal.model(0), router.port)


@pytest.fixture
def own_rollout(
    request: pytest.FixtureRequest, framework: Framework, args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> Rollout:
    """The trainer's own rollout function, with partial rollouts."""
    if framework.package == "miles":  # it imports SGLang's router
        monkeypatch.syspath_prepend(unpacked(PACKAGES, request.config.cache.mkdir("packages")))
    importlib.import_module(f"{framework.package}.utils.http_utils").init_http_client(args)
    module = importlib.import_module(f"{framework.package}.rollout.sglang_rollout")
    function: Rollout = importlib.reload(module).generate_rollout  # without the state of an earlier test
    return function


def trainer_args(folder: Path, model: Path, router_port: int) -> Namespace:
    """The trainer's arguments for rollouts of 4 groups of 2 samples."""
    data = folder / "prompts.jsonl"
    rows = [{"text": f"the quick brown fox {i}", "label": str(i), "metadata": {"number": i}} for i in range(100)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Namespace(
        rollout_global_dataset=True, prompt_data=str(data), input_key="text", label_key="label",
        metadata_key="metadata", tool_key=None, multimodal_keys=None, apply_chat_template=False,
        apply_chat_template_kwargs=None, rollout_max_prompt_len=None, rollout_shuffle=False, rollout_seed=1,
        dump_details=None, buffer_filter_path=None, hf_checkpoint=str(model), chat_template_path=None,
        rollout_batch_size=4, over_sampling_batch_size=8, n_samples_per_prompt=2, partial_rollout=True,
        mask_offpolicy_in_partial_rollout=False, rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1,
        rollout_max_response_len=60, rollout_stop=None, rollout_stop_token_ids=STOPS,
        rollout_skip_special_tokens=True, group_rm=False, custom_rm_path=FUNCTIONS + "reward", rm_type=None,
        dynamic_sampling_filter_path=None, rollout_sample_filter_path=None, rollout_all_samples_process_path=None,
        custom_generate_function_path=None, use_rollout_routing_replay=False, ci_test=False, reward_key=None,
        sglang_router_ip="127.0.0.1", sglang_router_port=router_port, sglang_server_concurrency=64,
        sglang_dp_size=None,
        sglang_router_policy=None, sglang_speculative_algorithm=None, use_miles_router=False, dumper_enable=False,
        dumper_inference=None, use_distributed_post=False, rollout_num_engines=1, rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
    )  # fmt: skip


def source(framework: Framework, args: Namespace) -> Any:
    return importlib.import_module(f"{framework.package}.rollout.data_source").RolloutDataSourceWithBuffer(args)


def check_sample(framework: Framework, sample: Any) -> None:
    """What training reads of a sample is complete and consistent."""
    assert isinstance(sample, framework.Sample)
    assert isinstance(sample.tokens, list)
    assert {type(token) for token in sample.tokens} == {int}
    assert isinstance(sample.response, str)
    assert isinstance(sample.response_length, int)
    length = sample.response_length
    assert 0 < length == len(sample.loss_mask) == len(sample.rollout_log_probs) <= 60
    assert sample.status in (framework.Sample.Status.COMPLETED, framework.Sample.Status.TRUNCATED)
    assert len(sample.tokens) > length
    assert max(sample.rollout_log_probs) <= 0
    assert sample.reward is not None
    assert sample.label == str(sample.metadata["number"])
    assert sample.prompt == f"the quick brown fox {sample.label}"
