"""Rollouts beside the trainer's own partial rollout on one live server: the same samples, the same calls of the user's
functions, time per rollout."""

import importlib
import statistics
import time
from argparse import Namespace
from typing import Any

import pytest

from sglang_april.integrations.framework import Framework
from sglang_april.integrations.group_rollout import Rollouts
from tests.integration.slime_fixtures import FUNCTIONS, Rollout, check_sample, source
from tests.support.live import LiveServer

pytest_plugins = ("tests.integration.slime_fixtures",)


@pytest.fixture(params=["the trainer's own", "here"])
def generate(request: pytest.FixtureRequest, framework: Framework, own_rollout: Rollout) -> Rollout:
    """The rollout function of the trainer, and that of this project."""
    return Rollouts(framework).generate_rollout if request.param == "here" else own_rollout


def test_samples_have_the_fields_of_the_trainers_own(
    framework: Framework, args: Namespace, normal: LiveServer, own_rollout: Rollout
) -> None:
    """Over pushes, so that some samples of both were continued under another policy."""
    rollouts = [own_rollout, Rollouts(framework).generate_rollout]
    sources = [source(framework, args) for _ in rollouts]
    tokenizer, continued = framework.tokenizer(args), [0, 0]
    for rollout_id in range(4):
        normal.push(rollout_id % 2)
        outputs = [rollout(args, rollout_id, sources[i], False) for i, rollout in enumerate(rollouts)]
        own_samples, april_samples = [[sample for group in out.samples for sample in group] for out in outputs]
        for own_sample, april_sample in zip(own_samples, april_samples, strict=True):
            if framework.package == "miles" and own_sample.loss_mask is None:
                own_sample.loss_mask = [1] * own_sample.response_length  # as miles's rollout manager completes it
            assert fields(april_sample) == fields(own_sample)
            for i, sample in enumerate((own_sample, april_sample)):
                check_sample(framework, sample)
                prompt = tokenizer.encode(sample.prompt, add_special_tokens=False)
                assert sample.tokens[: -sample.response_length] == prompt
                continued[i] += "start_rollout_id" in sample.metadata
    assert all(continued)


def test_time_per_rollout_beside_the_trainers_own(
    framework: Framework, args: Namespace, normal: LiveServer, run: str, own_rollout: Rollout,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Prints seconds per rollout of both, in turn, with a push before each: as many groups, none of them twice. Here
    every group that was drawn from the data source is delivered or still in the engine."""
    args.rollout_stop_token_ids, args.rollout_max_response_len = list(range(6, 20)), 400  # one token in 36 ends
    own = f"{framework.package}'s own"
    rollouts = {own: own_rollout, "here": Rollouts(framework).generate_rollout}
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
    rows = normal.server.http.get("/april/partials", params={"run": run}).json()["groups"]
    drawn = range(sources["here"].sample_group_index)
    assert sorted([*groups["here"], *(int(row["id"]) for row in rows)]) == list(drawn)
    with capsys.disabled():
        for name, times in seconds.items():
            print(f"\n{name}: {statistics.median(times):.2f} s per rollout ({', '.join(f'{t:.2f}' for t in times)})")


def test_filter_and_process_functions_get_what_the_trainer_gives_them(
    framework: Framework, args: Namespace, generate: Rollout
) -> None:
    """The sample filter gets the delivered groups; the function for all samples also those that were dropped."""
    args.dynamic_sampling_filter_path = FUNCTIONS + "drop_odd_groups"
    args.over_sampling_batch_size = 5  # three even groups: one is dropped and replaced before there are four
    args.rollout_sample_filter_path = FUNCTIONS + "filter_samples"
    args.rollout_all_samples_process_path = FUNCTIONS + "process_all_samples"
    data = source(framework, args)
    delivered = generate(args, 0, data, False).samples
    assert args.filter_got == delivered
    assert [[sample.remove_sample for sample in group] for group in delivered] == [[True, False]] * 4
    processed, given = args.process_got
    assert given == data.get_samples
    indices = [group[0].group_index for group in processed]
    assert indices == sorted(set(indices))
    assert [index for index in indices if index % 2]
    assert [group for group in delivered if group not in processed] == []
    assert all(sample.reward is not None for group in processed for sample in group)


@pytest.mark.parametrize("framework", ["slime"], indirect=True)
def test_sample_hooks_come_before_the_reward(
    framework: Framework, args: Namespace, generate: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in turn, as slime's rollout manager has named the rollout. Only samples without a reward get one."""
    monkeypatch.setattr(importlib.import_module("slime.rollout.sample_hooks"), "_current_rollout_id", 7)
    args.rollout_sample_hook_path = [FUNCTIONS + "sample_hook", FUNCTIONS + "second_hook"]
    args.custom_rm_path = FUNCTIONS + "hooked_reward"
    for group in generate(args, 7, source(framework, args), False).samples:
        assert [sample.metadata["hook"] for sample in group] == [[7, False, "second"]] * 2
        assert [sample.reward for sample in group] == [7.0, -1.0]


def fields(sample: Any) -> dict[str, type]:
    """The type of each field that training reads: not of the router's session, nor of slime's own trace."""
    return {name: type(value) for name, value in sample.__dict__.items() if name not in ("session_id", "trace")}
