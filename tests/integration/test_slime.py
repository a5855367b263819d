"""Rollouts of slime's kind with the trainer's own data source, samples and rewards, on a live server.

CI runs them with miles, slime's fork, whose wheel is unpacked and not installed: it has packages of SGLang in it. With
`SLIME_PATH`, the path of a checkout, they run with slime as well, and beside slime's own partial rollout.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_april.integrations.framework import Framework
from sglang_april.integrations.group_rollout import Rollouts
from tests.support.live import LiveServer
from tests.support.router import Router
from tests.support.server import ROOT

MILES = "miles-rl==0.0.2"
FUNCTIONS = "tests.integration.slime_functions."
STOPS = list(range(6, 70))
"""One token in eight ends a response, so lengths differ."""


@pytest.fixture(scope="module", params=["miles", "slime"])
def framework(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    folder = Path(os.environ.get(f"{request.param.upper()}_PATH", ""))
    if folder == Path() and request.param == "slime":
        pytest.skip("SLIME_PATH names no checkout of slime, which has no package")
    if folder == Path():
        folder = tmp_path_factory.mktemp("miles")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), MILES]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("miles/")])
    sys.path.insert(0, str(folder))
    yield Framework(request.param)
    sys.path.remove(str(folder))


@pytest.fixture
def args(normal: LiveServer, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """The trainer's arguments for a rollout of 4 groups of 2 samples."""
    monkeypatch.setenv("SGLANG_APRIL_RUN", run)
    data = tmp_path / "prompts.jsonl"
    rows = [{"text": f"the quick brown fox {i}", "label": str(i), "metadata": {"number": i}} for i in range(100)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Router([normal.server.url]) as router:
        yield Namespace(
            rollout_global_dataset=True, prompt_data=str(data), input_key="text", label_key="label",
            metadata_key="metadata", tool_key=None, multimodal_keys=None, apply_chat_template=False,
            apply_chat_template_kwargs=None, rollout_max_prompt_len=None, rollout_shuffle=False, rollout_seed=1,
            dump_details=None, buffer_filter_path=None, hf_checkpoint=str(normal.model(0)), chat_template_path=None,
            rollout_batch_size=4, over_sampling_batch_size=8, n_samples_per_prompt=2, partial_rollout=True,
            mask_offpolicy_in_partial_rollout=False, rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1,
            rollout_max_response_len=60, rollout_stop=None, rollout_stop_token_ids=STOPS,
            rollout_skip_special_tokens=True, group_rm=False, custom_rm_path=FUNCTIONS + "reward", rm_type=None,
            dynamic_sampling_filter_path=None, rollout_sample_filter_path=None, rollout_all_samples_process_path=None,
            custom_generate_function_path=None, use_rollout_routing_replay=False, ci_test=False, reward_key=None,
            sglang_router_ip="127.0.0.1", sglang_router_port=router.port, sglang_server_concurrency=64,
            sglang_dp_size=None,
            use_distributed_post=False, rollout_num_engines=1, rollout_num_gpus=1, rollout_num_gpus_per_engine=1,
        )  # fmt: skip


def source(framework: Framework, args: Namespace) -> Any:
    return importlib.import_module(f"{framework.package}.rollout.data_source").RolloutDataSourceWithBuffer(args)


def check_sample(framework: Framework, sample: Any) -> None:
    """What training reads of a sample is complete and consistent, and all that slime's contract asks of its output
    (`assert_sample_contract` of its `test_plugin_rollout_contracts`)."""
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


def test_rollouts_over_pushes_deliver_every_group_once(
    framework: Framework, args: Namespace, normal: LiveServer
) -> None:
    rollouts, data, seen, asked = Rollouts(framework), source(framework, args), list[int](), list[int]()
    get_samples = data.get_samples
    data.get_samples = lambda count: asked.append(count) or get_samples(count)
    versions = set[str]()
    for rollout_id in range(5):
        output = rollouts.generate_rollout(args, rollout_id, data, False)
        assert [len(group) for group in output.samples] == [2] * 4
        for group in output.samples:
            assert len({sample.group_index for sample in group}) == 1
            for sample in group:
                check_sample(framework, sample)
                seen.append(sample.index)
                versions |= set(sample.weight_versions)
        carried = output.metrics["rollout/april/carried_groups"]
        assert carried == len(normal.server.http.get("/april/partials").json()["groups"])
        normal.push(rollout_id % 2)
    assert len(seen) == len(set(seen)) == 40
    assert asked == [8, 4, 4, 4, 4]
    assert len(versions) > 1


def test_dropped_groups_are_replaced_while_the_round_is_open(framework: Framework, args: Namespace) -> None:
    args.dynamic_sampling_filter_path = FUNCTIONS + "drop_odd_groups"
    args.over_sampling_batch_size = 5
    groups = list[int]()
    rollouts, data = Rollouts(framework), source(framework, args)
    for rollout_id in range(3):
        output = rollouts.generate_rollout(args, rollout_id, data, False)
        groups += [group[0].group_index for group in output.samples]
    assert len(groups) == len(set(groups)) == 12
    assert not [index for index in groups if index % 2]


def test_group_rewards_and_masks_of_stale_tokens(framework: Framework, args: Namespace, normal: LiveServer) -> None:
    args.group_rm, args.custom_rm_path = True, FUNCTIONS + "group_reward"
    args.mask_offpolicy_in_partial_rollout = True
    rollouts, data, masked = Rollouts(framework), source(framework, args), 0
    for rollout_id in range(6):
        version = str(normal.version)
        for group in rollouts.generate_rollout(args, rollout_id, data, False).samples:
            assert [sample.reward for sample in group] == [0.0, 1.0]
            for sample in group:
                fresh = version in sample.weight_versions
                assert any(sample.loss_mask) == fresh
                assert all(sample.loss_mask) == (sample.weight_versions == [version])
                assert ("start_rollout_id" in sample.metadata) == (sample.weight_versions[0] != version)
                masked += sample.loss_mask.count(0)
        normal.push(rollout_id % 2)
    assert masked


def test_restarted_manager_continues_with_what_the_engine_has(
    framework: Framework, args: Namespace, normal: LiveServer
) -> None:
    """The data source begins again, as after a restart without a checkpoint: groups at the engine are not repeated."""
    first = Rollouts(framework).generate_rollout(args, 0, source(framework, args), False)
    held = {row["id"] for row in normal.server.http.get("/april/partials").json()["groups"]}
    assert held
    delivered = [group[0].group_index for group in first.samples]
    restarted, data = Rollouts(framework), source(framework, args)
    again = list[int]()
    for rollout_id in range(3):
        output = restarted.generate_rollout(args, rollout_id, data, False)
        again += [group[0].group_index for group in output.samples]
        for group in output.samples:
            for sample in group:
                check_sample(framework, sample)
    assert len(again) == len(set(again)) == 12
    assert {int(name) for name in held} <= set(again)
    assert not set(delivered) & {int(name) for name in held}


def test_without_partial_rollout_nothing_is_carried(framework: Framework, args: Namespace, normal: LiveServer) -> None:
    args.partial_rollout = False
    output = Rollouts(framework).generate_rollout(args, 0, source(framework, args), False)
    assert len(output.samples) == 4
    assert normal.server.http.get("/april/partials").json()["groups"] == []


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("rollout_top_p", 0.9, "--rollout-top-p must be 1"),
        ("custom_generate_function_path", "m.f", "attach them to a run"),
        ("use_rollout_routing_replay", True, "routed experts"),
    ],
)
def test_arguments_that_a_round_cannot_honour_are_refused(
    framework: Framework, args: Namespace, field: str, value: object, reason: str
) -> None:
    setattr(args, field, value)
    with pytest.raises(ValueError, match=reason):
        Rollouts(framework).generate_rollout(args, 0, source(framework, args), False)


def test_failed_reward_ends_the_round_and_its_groups_stay(
    framework: Framework, args: Namespace, normal: LiveServer
) -> None:
    path, args.custom_rm_path = args.custom_rm_path, FUNCTIONS + "missing"
    rollouts, data = Rollouts(framework), source(framework, args)
    with pytest.raises(AttributeError):
        rollouts.generate_rollout(args, 0, data, False)
    assert normal.server.state()["rounds"] == []
    args.custom_rm_path = path
    output = rollouts.generate_rollout(args, 0, data, False)
    assert {group[0].group_index for group in output.samples} <= set(range(8))


def test_evaluation_is_the_trainers_own(framework: Framework, args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    own = SimpleNamespace(generate_rollout=lambda *given, **named: calls.append((given, named)) or "evaluated")
    monkeypatch.setitem(sys.modules, f"{framework.package}.rollout.sglang_rollout", own)
    assert Rollouts(framework).generate_rollout(args, 3, "data", True) == "evaluated"
    assert calls == [((args, 3, "data"), {"evaluation": True})]


def test_paths_of_the_rollout_functions(framework: Framework, args: Namespace) -> None:
    """As `--rollout-function-path` loads them."""
    function = framework.load_function(f"sglang_april.integrations.{framework.package}.generate_rollout")
    assert len(function(args, 0, source(framework, args), evaluation=False).samples) == 4


def test_samples_have_the_fields_of_slimes_own_partial_rollout(
    framework: Framework, args: Namespace, normal: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if framework.package != "slime":
        pytest.skip("miles's own rollout needs sglang-router")
    own = importlib.import_module("slime.rollout.sglang_rollout")
    importlib.import_module("slime.utils.http_utils").init_http_client(args)
    slime_output = own.generate_rollout(args, 0, source(framework, args))
    april_output = Rollouts(framework).generate_rollout(args, 0, source(framework, args), False)
    assert len(slime_output.samples) == len(april_output.samples) == 4
    for slime_group, april_group in zip(slime_output.samples, april_output.samples, strict=True):
        for slime_sample, april_sample in zip(slime_group, april_group, strict=True):
            assert fields(april_sample) == fields(slime_sample)
            for sample in (slime_sample, april_sample):
                check_sample(framework, sample)
                prompt = framework.tokenizer(args).encode(sample.prompt, add_special_tokens=False)
                assert sample.tokens[: -sample.response_length] == prompt


def test_time_per_rollout_beside_slimes_own(
    framework: Framework, args: Namespace, normal: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints seconds per rollout of both, in turn, with a push before each: as many groups, none of them twice."""
    if framework.package != "slime":
        pytest.skip("miles's own rollout needs sglang-router")
    own = importlib.import_module("slime.rollout.sglang_rollout")
    importlib.import_module("slime.utils.http_utils").init_http_client(args)
    own.GenerateState.clear_instances()  # an earlier test's router has gone
    args.rollout_stop_token_ids, args.rollout_max_response_len = list(range(6, 20)), 400  # one token in 36 ends
    rollouts = {"slime's own": own.generate_rollout, "here": Rollouts(framework).generate_rollout}
    sources = {name: source(framework, args) for name in rollouts}
    seconds: dict[str, list[float]] = {name: [] for name in rollouts}
    groups: dict[str, list[int]] = {name: [] for name in rollouts}
    for rollout_id in range(6):
        for name, generate in rollouts.items():
            normal.push(rollout_id % 2)
            began = time.monotonic()
            output = generate(args, rollout_id, sources[name], False)
            seconds[name].append(time.monotonic() - began)
            groups[name] += [group[0].group_index for group in output.samples]
    for delivered in groups.values():
        assert len(delivered) == len(set(delivered)) == 24
    with capsys.disabled():
        for name, times in seconds.items():
            print(f"\n{name}: {statistics.median(times):.2f} s per rollout ({', '.join(f'{t:.2f}' for t in times)})")


def test_contract_of_slimes_rollout_functions(framework: Framework) -> None:
    """slime's own check of the signature. Its check of outputs calls with `args=None`, which slime's own function
    cannot serve either: here the error says so, and `check_sample` has its assertions."""
    if framework.package != "slime":
        pytest.skip("the wheel of miles has no contract tests")
    checkout = Path(os.environ["SLIME_PATH"])
    code = (
        "from plugin_contracts import test_plugin_rollout_contracts as contract\n"
        "function = contract.load_function('sglang_april.integrations.slime.generate_rollout')\n"
        "contract.assert_rollout_function_signature_matches_default(function)\n"
        "for served in (function, contract.default_generate_rollout):\n"
        "    try:\n"
        "        contract.assert_rollout_function_matches_default_contract(served)\n"
        "    except (ValueError, AttributeError, TypeError) as error:\n"
        "        print(error)\n"
        "    else:\n"
        "        raise SystemExit('it can be served')\n"
    )
    path = os.pathsep.join(map(str, (checkout, checkout / "tests", ROOT)))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("sglang_april: args is None")


def fields(sample: Any) -> dict[str, type]:
    """The type of each field that training reads: not of the router's session, nor of slime's own trace."""
    return {name: type(value) for name, value in sample.__dict__.items() if name not in ("session_id", "trace")}
