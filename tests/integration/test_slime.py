"""Rollouts of slime's kind with the trainer's own data source, samples and rewards, on live servers."""

import importlib
import json
import re
import shlex
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_april import config
from sglang_april.integrations.framework import Framework
from sglang_april.integrations.group_rollout import Rollouts
from tests.integration.slime_fixtures import FUNCTIONS, check_sample, source, trainer_args
from tests.support.live import LiveServer
from tests.support.router import sglang_router
from tests.support.server import ROOT
from tests.support.workload import prompt

pytest_plugins = ("tests.integration.slime_fixtures",)


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


def test_engines_behind_sglangs_router_share_a_quota_and_get_one_version(
    framework: Framework, request: pytest.FixtureRequest, normal: LiveServer, second: LiveServer, run: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The trainer names its version in every weight call, so an engine that was restarted has it after the next one."""
    monkeypatch.setenv("SGLANG_APRIL_RUN", run)
    engines = [normal, second]
    normal.push(0)
    if normal.version == second.version:
        normal.push(0)
    with sglang_router(request, [live.server for live in engines]) as client:
        args = trainer_args(tmp_path, normal.model(0), client.base_url.port or 0)
        rollouts, data, seen = Rollouts(framework), source(framework, args), list[int]()
        decodes = [live.decodes() for live in engines]
        for rollout_id in range(4):
            version = 1 + max(live.version for live in engines)
            for live in engines:
                live.server.loaded = live.model(rollout_id % 2)
                body = {"model_path": str(live.server.loaded), "weight_version": str(version)}
                live.server.post("/update_weights_from_disk", body)
            assert [live.version for live in engines] == [version] * 2
            output = rollouts.generate_rollout(args, rollout_id, data, False)
            assert [len(group) for group in output.samples] == [2] * 4
            for sample in (sample for group in output.samples for sample in group):
                check_sample(framework, sample)
                seen.append(sample.index)
            carried = [
                row["id"] for live in engines for row in live.server.http.get("/april/partials").json()["groups"]
            ]
            assert len(carried) == output.metrics["rollout/april/carried_groups"]
    assert len(seen) == len(set(seen)) == 32
    assert all(live.decodes() > before for live, before in zip(engines, decodes, strict=True))


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


def test_evaluation_is_the_trainers_own(
    framework: Framework, args: Namespace, normal: LiveServer, run: str, own_rollout: object
) -> None:
    """It runs on the same engines, and leaves the groups that a round carries alone."""
    normal.server.rollout(run=run, prompts=[prompt("a", 3), prompt("b", 500)], quota=1)
    carried = normal.server.partials(run)
    assert [row["id"] for row in carried] == ["b"]
    args.group_rm = args.partial_rollout = False
    args.eval_max_prompt_len = args.eval_reward_key = None
    dataset = importlib.import_module(f"{framework.package}.utils.eval_config").EvalDatasetConfig(
        name="held-out", path=args.prompt_data, n_samples_per_eval_prompt=2, temperature=1.0, top_p=1.0, top_k=-1,
        max_response_len=8, input_key="text", label_key="label", metadata_key="metadata",
    )  # fmt: skip
    args.eval_datasets = [dataset]
    evaluated = Rollouts(framework).generate_rollout(args, 0, None, True).data["held-out"]
    assert len(evaluated["rewards"]) == len(evaluated["samples"]) == 200
    assert all(0 < sample.response_length <= 8 for sample in evaluated["samples"])
    assert normal.server.partials(run) == carried


def test_command_of_the_page(framework: Framework) -> None:
    """Its runtime environment is JSON that activates the plugin, and the trainer knows its flags."""
    (command,) = re.findall(
        r"^ray job submit.*?(?=^```)", (ROOT / "docs/integrations/slime.md").read_text(), re.M | re.S
    )
    words = shlex.split(command.replace("\\\n", " "))
    (env,) = [word.partition("=")[2] for word in words if word.startswith("--runtime-env-json=")]
    assert config.from_env(json.loads(env.replace(", …", ""))["env_vars"])["quota"] == 32
    flags = [word for word in words[words.index("train.py") :] if word.startswith("--")]
    spec = find_spec(f"{framework.package}.utils.arguments")
    assert spec is not None
    arguments = Path(spec.origin or "").read_text()
    assert flags
    assert [flag for flag in flags if f'"{flag}"' not in arguments] == []


def test_the_trainer_calls_the_function_of_the_path(framework: Framework, args: Namespace) -> None:
    """As its rollout manager calls what `--rollout-function-path` names."""
    path, data = f"sglang_april.integrations.{framework.package}.generate_rollout", source(framework, args)
    types = importlib.import_module(f"{framework.package}.rollout.base_types")
    output = types.call_rollout_fn(framework.load_function(path), args, 0, data, evaluation=False)
    assert type(output) is types.RolloutFnTrainOutput
    assert len(output.samples) == 4


@pytest.mark.parametrize("framework", ["miles"], indirect=True)
def test_miles_adapter_of_legacy_functions_calls_the_function_of_the_path(
    framework: Framework, args: Namespace
) -> None:
    """As its rollout manager does with `MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1`."""
    types = importlib.import_module("miles.rollout.base_types")
    adapters = importlib.import_module("miles.rollout.inference_rollout.compatibility")
    made = types.RolloutFnConstructorInput(args=args, data_source=source(framework, args))
    function = adapters.load_rollout_function(made, "sglang_april.integrations.miles.generate_rollout")
    assert type(function) is adapters.LegacyRolloutFnAdapter
    for rollout_id in range(2):
        output = adapters.call_rollout_function(function, types.RolloutFnTrainInput(rollout_id=rollout_id))
        assert type(output) is types.RolloutFnTrainOutput
        assert [len(group) for group in output.samples] == [2] * 4
