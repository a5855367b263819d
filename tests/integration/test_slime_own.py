"""slime's contract tests, and its own rollouts on an engine that other jobs use, of the checkout in `SLIME_PATH`."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_april.integrations.framework import Framework
from tests.integration.slime_fixtures import Rollout, imported, source
from tests.support.live import LiveServer, until
from tests.support.server import ROOT, Server
from tests.support.workload import prompt

pytest_plugins = ("tests.integration.slime_fixtures",)


@pytest.fixture(scope="module")
def framework(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    with imported("slime", tmp_path_factory) as made:
        yield made


CONTRACT = """
import json
from argparse import Namespace

from sglang_april.integrations.slime import generate_rollout as april
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import init_http_client
from slime.utils.types import Sample

ARGS = Namespace(**json.load(open(ARGUMENTS)))
init_http_client(ARGS)  # as slime's rollout manager does
ARGS.eval_datasets = [
    EvalDatasetConfig(name=ARGS.prompt_data, path=ARGS.prompt_data, n_samples_per_eval_prompt=1, temperature=1.0,
                      top_p=1.0, top_k=-1, max_response_len=4, input_key="text", label_key="label",
                      metadata_key="metadata")
]


class Prompts:
    def __init__(self, data_source):
        self.data_source = data_source

    def get_samples(self, count):
        groups = self.data_source.get_samples(count)
        return [[Sample(index=sample.index, prompt=group[0].prompt) for sample in group] for group in groups]


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert args is None
    return april(ARGS, rollout_id, Prompts(data_source), evaluation)
"""
"""The function that slime's contract tests load: they call with `args=None`, which no rollout function for live
engines can serve, and which slime's own cannot either. Its arguments are those of this test. The samples of their data
source are finished, and those of a group have different prompts; it passes on one prompt for each group."""


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
        self, framework: Framework, args: Namespace, normal: LiveServer, run: str, own_rollout: Rollout
    ) -> None:
        """Groups that a run has left in the engine are no load."""
        other = f"{run}-other"
        normal.server.rollout(run=other, prompts=[prompt("a", 3), prompt("b", 500)], quota=1)
        assert len(own_rollout(args, 0, source(framework, args), False).samples) == 4
        assert [row["id"] for row in normal.server.partials(other)] == ["b"]

    def test_it_ends_open_rounds_of_other_runs(
        self, framework: Framework, args: Namespace, normal: LiveServer, run: str, own_rollout: Rollout
    ) -> None:
        other = f"{run}-other"
        reply = normal.open(run=other, prompts=[prompt("a", 1500)], quota=1)
        assert len(own_rollout(args, 0, source(framework, args), False).samples) == 4
        assert normal.result_of(reply)["end_reason"] == "stopped"
        assert [row["id"] for row in normal.server.partials(other)] == ["a"]

    def test_it_waits_as_long_as_a_run_generates_ahead(
        self, framework: Framework, args: Namespace, normal: LiveServer, run: str, own_rollout: Rollout
    ) -> None:
        """Its aborts do not end such a run, whose samples are load."""
        other, server = f"{run}-other", normal.server
        with server.slowed(0.05):
            body = {"run": other, "quota": 1, "after_quota": "continue", "ahead": 5}
            server.rollout(prompts=[prompt("a", 3), prompt("b", 1500)], **body)
            before = aborts(server)
            rollout = normal.in_background(own_rollout, args, 0, source(framework, args), False)
            until(lambda: rollout.done() or aborts(server) >= before + 2, "slime aborts for the second time")
            assert not rollout.done()
            assert server.state()["samples"]["running"] == 1
            server.post("/april/drop", {"run": other})
        assert len(normal.result_of(rollout).samples) == 4


def aborts(server: Server) -> int:
    return server.log.read_text(errors="replace").count("POST /abort_request")
