"""AReaL's workflows and trainer on a live server. Run by tests/integration/test_areal.py."""

import asyncio
import re
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, SGLangConfig
from areal.workflow.multi_turn import MultiTurnWorkflow
from areal.workflow.rlvr import RLVRWorkflow
from transformers import AutoTokenizer

from sglang_april.integrations.areal import Backend, SGLangEngine
from tests.frameworks.areal_fixtures import begin, push, request
from tests.support.live import LiveServer, until
from tests.support.server import ROOT

pytest_plugins = ("tests.frameworks.areal_fixtures",)

LENGTH = 40
DATA = {"messages": [{"role": "user", "content": "one two"}]}
SAMPLING = GenerationHyperparameters(max_new_tokens=LENGTH, greedy=True, ignore_eos=True)


def no_reward(*_: Any, **__: Any) -> float:
    """AReaL calls it in a process of its own. Zero: the workflow of several turns asks again."""
    return 0.0


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the server answers to the engine's requests."""
    kept: list[dict[str, Any]] = []
    parse = Backend.parse_generation_response

    def parse_and_keep(self: Backend, response: dict[str, Any]) -> Any:
        kept.append(response)
        return parse(self, response)

    monkeypatch.setattr(Backend, "parse_generation_response", parse_and_keep)
    return kept


def over_a_push(workflow: Any, engine: SGLangEngine, live: LiveServer) -> dict[str, Any]:
    """An episode whose first request spans a push, with the engine that AReaL's executor passes to a workflow."""
    inner = engine._engine.workflow_executor.inference_engine
    with live.server.slowed(0.05):
        before = live.decodes()
        episode = live.in_background(lambda: asyncio.run(workflow.arun_episode(inner, DATA)))
        until(lambda: episode.done() or live.decodes() > before + 5, "the episode decodes")
        assert not episode.done(), episode.result()
        push(engine, live, 1)
    return {name: tensor.flatten().tolist() for name, tensor in live.result_of(episode).items()}


def check(live: LiveServer, result: dict[str, Any], answers: list[dict[str, Any]]) -> list[int]:
    """Assert that the episode has the engine's tokens and versions, and that a replay of them draws these tokens."""
    masked = [i for i, mask in enumerate(result["loss_mask"]) if mask]
    assert [result["input_ids"][i] for i in masked] == [token for answer in answers for token in answer["output_ids"]]
    versions: list[int] = []
    for number, answer in enumerate(answers):
        spans, drawn = answer["meta_info"]["april"]["spans"], masked[len(versions) :][: len(answer["output_ids"])]
        versions += [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        logprobs = [result["logprobs"][i] for i in drawn]
        sample = {"index": 0, "output_ids": answer["output_ids"], "logprobs": logprobs, "spans": spans, "seed": 0}
        group = {"id": f"turn {number}", "prompt_ids": result["input_ids"][: drawn[0]], "samples": [sample]}
        live.check([group], {group["id"]: {"temperature": 0}})
    assert [result["versions"][i] for i in masked] == versions
    assert {result["versions"][i] for i, mask in enumerate(result["loss_mask"]) if not mask} == {-1}
    return versions


def test_single_turn_workflow(engine: SGLangEngine, live: LiveServer, answers: list[dict[str, Any]]) -> None:
    first, tokenizer = live.version, AutoTokenizer.from_pretrained(live.model(0))
    result = over_a_push(RLVRWorkflow(no_reward, SAMPLING, tokenizer), engine, live)
    versions = check(live, result, answers)
    drawn = versions.count(first)
    assert 0 < drawn < LENGTH
    assert versions == [first] * drawn + [first + 1] * (LENGTH - drawn)
    assert len(answers) == 1


def test_workflow_of_several_turns(engine: SGLangEngine, live: LiveServer, answers: list[dict[str, Any]]) -> None:
    first, tokenizer = live.version, AutoTokenizer.from_pretrained(live.model(0))
    workflow = MultiTurnWorkflow(no_reward, SAMPLING, tokenizer, max_turns=2, turn_discount=0.9)
    result = over_a_push(workflow, engine, live)
    versions = check(live, result, answers)
    drawn = versions.count(first)
    assert 0 < drawn < LENGTH
    assert versions == [first] * drawn + [first + 1] * (2 * LENGTH - drawn)
    assert len(answers) == 2


def test_executor_runs_a_workflow(engine: SGLangEngine, live: LiveServer, answers: list[dict[str, Any]]) -> None:
    """It passes the inner engine to the workflow."""
    workflow = RLVRWorkflow(no_reward, SAMPLING, AutoTokenizer.from_pretrained(live.model(0)))
    (result,) = live.result_of(live.in_background(lambda: engine.rollout_batch([DATA], workflow)))
    versions = check(live, {name: tensor.flatten().tolist() for name, tensor in result.items()}, answers)
    assert versions == [live.version] * LENGTH


@pytest.fixture
def rl_trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """AReaL's trainer module after the assignment of the page. Four loggers that it imports are not installed here."""
    for name in ("swanlab", "trackio", "wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["tensorboardX"], "SummaryWriter", None, raising=False)
    module = import_module("areal.trainer.rl_trainer")
    monkeypatch.setattr(module, "RemoteSGLangEngine", module.RemoteSGLangEngine)  # undoes the assignment afterwards
    page = (ROOT / "docs/integrations/areal.md").read_text()
    (block,) = re.findall(r"^```text\n(import areal\..*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(block, {})
    return module


def test_trainer_constructs_the_engine_of_the_page(
    rl_trainer: Any, config: InferenceEngineConfig, live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AReaL's own function, in its mode of one process per GPU; by default it sends the class to its workers."""
    trainer = SimpleNamespace(
        config=SimpleNamespace(
            rollout=config, sglang=SGLangConfig(model_path=str(live.model(0))), actor=SimpleNamespace(use_lora=False)
        ),
        rollout_alloc=ModelAllocation.from_str("sglang:d1"),
        actor_alloc=ModelAllocation.from_str("fsdp:d1"),
    )
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", f"127.0.0.1:{live.server.port}")
    made = rl_trainer.PPOTrainer._init_rollout(trainer, config)
    assert type(made) is SGLangEngine
    made.destroy()
    assert rl_trainer.RemoteSGLangEngine.as_controller(config, None).inf_engine is SGLangEngine


def test_metrics_of_the_page(engine: SGLangEngine, live: LiveServer) -> None:
    def metrics() -> dict[str, float]:
        """Values by name and labels, without the model's."""
        lines = live.server.http.get("/metrics").text.splitlines()
        named = [line.rsplit(" ", 1) for line in lines if line.startswith("sglang_april:")]
        return {re.sub(r'model_name="[^"]*",?', "", name).replace("{}", ""): float(value) for name, value in named}

    page = (ROOT / "docs/integrations/areal.md").read_text()
    suspended, version = re.findall(r"`(sglang_april:.*?)`", page)
    with live.server.slowed(0.05):
        answer = begin(engine, live, request())
        engine.pause_generation()
        until(lambda: metrics()[suspended] == 1, "the request is suspended")
        engine.continue_generation()
    live.result_of(answer)
    push(engine, live, 1)
    until(lambda: metrics()[version] == engine.get_version(), "the scrape has the new version")  # one report a second
