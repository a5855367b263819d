"""Rollouts beside slime's own code, of the checkout that `SLIME_PATH` names: the same samples, time per rollout, its
contract tests, and its own rollouts on an engine that other jobs use."""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_april.integrations.framework import Framework
from sglang_april.integrations.group_rollout import Rollouts
from tests.integration.slime_fixtures import check_sample, imported, source
from tests.support.live import LiveServer, until
from tests.support.server import ROOT, Server
from tests.support.workload import prompt

pytest_plugins = ("tests.integration.slime_fixtures",)


@pytest.fixture(scope="module")
def framework(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    with imported("slime", tmp_path_factory) as made:
        yield made


def test_samples_have_the_fields_of_slimes_own_partial_rollout(
    framework: Framework, args: Namespace, normal: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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


CONTRACT = """
import json
from argparse import Namespace

from sglang_april.integrations.slime import generate_rollout as april
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import init_http_client

ARGS = Namespace(**json.load(open(ARGUMENTS)))
init_http_client(ARGS)  # as slime's rollout manager does
ARGS.eval_datasets = [
    EvalDatasetConfig(name=ARGS.prompt_data, path=ARGS.prompt_data, n_samples_per_eval_prompt=1, temperature=1.0,
                      top_p=1.0, top_k=-1, max_response_len=4, input_key="text", label_key="label",
                      metadata_key="metadata")
]


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert args is None
    return april(ARGS, rollout_id, data_source, evaluation)
"""
"""The function that slime's contract tests load: they call with `args=None`, which no rollout function for live
engines can serve, and which slime's own cannot either. Its arguments are those of this test."""


def test_contract_tests_of_slime_pass(framework: Framework, args: Namespace, tmp_path: Path) -> None:
    """All of slime's contract tests of rollout functions, by its own runner, with rollouts on a live server."""
    rows = Path(args.prompt_data).read_text().splitlines()[:3]
    Path(args.prompt_data).write_text("\n".join(rows))
    extra = {"custom_rm_path": "slime_functions.reward", "eval_max_prompt_len": None, "eval_reward_key": None}
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps({**vars(args), **extra}))
    (tmp_path / "live_rollout.py").write_text(CONTRACT.replace("ARGUMENTS", repr(str(arguments))))
    output = run_contract(tmp_path, "live_rollout.generate_rollout")
    assert "6 passed" in output, output


def test_contract_call_without_arguments_is_refused(framework: Framework, tmp_path: Path) -> None:
    """The same tests on the function itself: its signature is right, and the refusal says what is missing."""
    output = run_contract(tmp_path, "sglang_april.integrations.slime.generate_rollout")
    assert "ValueError: sglang_april: args is None: the router" in output
    assert "1 failed, 5 passed" in output, output


def run_contract(folder: Path, function: str) -> str:
    """slime's contract tests of rollout functions, in a process of its own, because they replace modules by stubs."""
    checkout = Path(os.environ["SLIME_PATH"])
    tests = checkout / "tests" / "plugin_contracts" / "test_plugin_rollout_contracts.py"
    path = os.pathsep.join(map(str, (folder, ROOT / "tests/integration", ROOT, checkout)))
    env = {**os.environ, "PYTHONPATH": path, "SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH": function}
    code = (  # ray and transformers are imported before slime's stubs replace them
        "import sys, pytest, ray, transformers\n"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir', {str(checkout)!r}, {str(tests)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True, timeout=400
    )
    return done.stdout + done.stderr


class TestEnginesThatOtherJobsUse:
    """slime's end of a rollout aborts everything on each engine, and waits until its load is zero."""

    def test_its_rollouts_end_beside_carried_groups(
        self, framework: Framework, args: Namespace, normal: LiveServer, run: str
    ) -> None:
        """Groups that a run has left in the engine are no load."""
        other = f"{run}-other"
        normal.server.rollout(run=other, prompts=[prompt("a", 3), prompt("b", 500)], quota=1)
        assert len(own_rollout(framework, args).samples) == 4
        assert [row["id"] for row in normal.server.partials(other)] == ["b"]

    def test_it_ends_open_rounds_of_other_runs(
        self, framework: Framework, args: Namespace, normal: LiveServer, run: str
    ) -> None:
        other = f"{run}-other"
        reply = normal.open(run=other, prompts=[prompt("a", 1500)], quota=1)
        assert len(own_rollout(framework, args).samples) == 4
        assert normal.result_of(reply)["end_reason"] == "stopped"
        assert [row["id"] for row in normal.server.partials(other)] == ["a"]

    def test_it_waits_as_long_as_a_run_generates_ahead(
        self, framework: Framework, args: Namespace, normal: LiveServer, run: str
    ) -> None:
        """Its aborts do not end such a run, whose samples are load."""
        other, server = f"{run}-other", normal.server
        with server.slowed(0.05):
            body = {"run": other, "quota": 1, "after_quota": "continue", "ahead": 5}
            server.rollout(prompts=[prompt("a", 3), prompt("b", 1500)], **body)
            before = aborts(server)
            rollout = normal.in_background(own_rollout, framework, args)
            until(lambda: rollout.done() or aborts(server) >= before + 2, "slime aborts for the second time")
            assert not rollout.done()
            assert server.state()["samples"]["running"] == 1
            server.post("/april/drop", {"run": other})
        assert len(normal.result_of(rollout).samples) == 4


def own_rollout(framework: Framework, args: Namespace) -> Any:
    """slime's own partial rollout."""
    own = importlib.import_module("slime.rollout.sglang_rollout")
    importlib.import_module("slime.utils.http_utils").init_http_client(args)
    own.GenerateState.clear_instances()  # of an earlier test, whose router has gone
    return own.generate_rollout(args, 0, source(framework, args), False)


def aborts(server: Server) -> int:
    return server.log.read_text(errors="replace").count("POST /abort_request")


def fields(sample: Any) -> dict[str, type]:
    """The type of each field that training reads: not of the router's session, nor of slime's own trace."""
    return {name: type(value) for name, value in sample.__dict__.items() if name not in ("session_id", "trace")}
