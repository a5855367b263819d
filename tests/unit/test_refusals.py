"""Arguments and variables of SGLang are allowed by list: each was reviewed, and others refuse the start by name."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.environ import EnvField, Envs
from sglang.srt.server_args import ServerArgs

from sglang_april.adapter import refusal_docs
from sglang_april.adapter.core import refusals
from sglang_april.adapter.core.environment import ENVIRONMENT
from sglang_april.adapter.core.refusals import ARGUMENTS
from sglang_april.adapter.refusals import changed_arguments, rule_for, stop_if
from sglang_april.adapter.shapes.installed import shape

FIELDS = [field.name for field in dataclasses.fields(ServerArgs)]
ROOT = Path(__file__).parents[2]

USED_BY_FRAMEWORKS: dict[str, Any] = {
    "trust_remote_code": True,
    "random_seed": 7,
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": True,
    "base_gpu_id": 4,
    "gpu_id_step": 2,
    "tp_size": 4,
    "ep_size": 4,
    "nnodes": 2,
    "node_rank": 1,
    "dist_init_addr": "node:1",
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "dtype": "bfloat16",
    "context_length": 32768,
    "mem_fraction_static": 0.7,
    "max_running_requests": 512,
    "max_prefill_tokens": 32768,
    "chunked_prefill_size": -1,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 1.1,
    "attention_backend": "fa3",
    "mm_attention_backend": "fa3",
    "cuda_graph_max_bs_decode": 256,
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "enable_metrics": True,
    "enable_torch_compile": True,
    "enable_nccl_nvls": True,
    "enable_priority_scheduling": True,
    "enable_deterministic_inference": True,
    "enable_return_routed_experts": True,
    "grammar_backend": "none",
    "kv_cache_dtype": "fp8_e4m3",
    "log_level": "error",
    "moe_a2a_backend": "deepep",
    "num_continuous_decode_steps": 4,
    "page_size": 64,
    "quantization": "fp8",
    "sampling_backend": "pytorch",
    "sleep_on_idle": True,
    "stream_interval": 8,
    "torchao_config": "int8wo",
    "triton_attention_num_kv_splits": 16,
    "watchdog_timeout": 3600,
}
"""Arguments that slime, verl, AReaL, the recipes, the benchmarks and the tests set."""


def requested(cls: type = ServerArgs, **given: Any) -> Any:
    """ServerArgs as the user gave them, before SGLang derives anything."""
    args = object.__new__(cls)
    for field in dataclasses.fields(args):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        object.__setattr__(args, field.name, given.get(field.name, default))
    return args


def sentence(args: Any) -> str:
    """The sentence that ends the start; empty if the start goes ahead."""
    try:
        stop_if(refusals.find(args))
    except SystemExit as stop:
        return str(stop)
    return ""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SGLANG_", "SGL_")):
            monkeypatch.delenv(name)


def test_every_argument_of_this_release_was_reviewed_once() -> None:
    """The lists also have names that only other releases have: test_reviewed_sources.py."""
    reviewed = [name for rule in ARGUMENTS for name in rule.names]
    assert set(FIELDS) <= set(reviewed)
    assert len(set(reviewed)) == len(reviewed)


def test_every_variable_of_this_release_was_reviewed() -> None:
    names = [name for name, field in vars(Envs).items() if isinstance(field, EnvField)]
    assert [name for name in names if rule_for(name, ENVIRONMENT) is None] == []


def test_an_argument_that_a_new_release_adds_refuses_the_start_by_name() -> None:
    release = dataclasses.make_dataclass("Release", [("enable_kv_magic", bool, False)], bases=(ServerArgs,))
    assert sentence(requested(release, model_path="m")) == ""
    assert sentence(requested(release, model_path="m", enable_kv_magic=True)) == (
        "sglang-april: --enable-kv-magic is not supported: its effect on suspended samples has not been reviewed."
    )


def test_a_variable_that_a_new_release_adds_refuses_the_start_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    field = type(Envs.SGLANG_RUST_SERVER)(False)
    field.name = "SGLANG_KV_MAGIC"
    monkeypatch.setattr(Envs, "SGLANG_KV_MAGIC", field, raising=False)
    assert sentence(requested()) == ""
    monkeypatch.setenv("SGLANG_KV_MAGIC", "1")
    assert "SGLANG_KV_MAGIC=True is not supported: its effect on" in sentence(requested())


@pytest.mark.parametrize("name", USED_BY_FRAMEWORKS)
def test_arguments_of_frameworks_and_recipes_are_supported(name: str) -> None:
    args = requested(**{name: USED_BY_FRAMEWORKS[name]})
    assert [setting.name for setting in changed_arguments(shape.arguments(args))] == [name]
    assert sentence(args) == ""


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"kv_cache_dtype": "mxfp8"}, "--kv-cache-dtype mxfp8 is not supported: the pool keeps scales"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 is not"),
        ({"dp_size": 2}, "--dp-size 2 is not supported: SGLang's data-parallel controller sends"),
        ({"schedule_policy": "random"}, "--schedule-policy random is not"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk is not"),
        ({"enable_lora": True}, "--enable-lora is not"),
        ({"lora_paths": ["a=b"]}, "--lora-paths"),
        ({"sampling_backend": "ascend"}, "--sampling-backend ascend is not"),
        ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout is not"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE is not"),
    ],
)
def test_refused_values(given: dict[str, Any], start: str) -> None:
    assert sentence(requested(**given)).startswith(f"sglang-april: {start}")


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "1", True),
        ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "0", False),
        ("SGLANG_ENABLE_UNIFIED_RADIX_TREE", "true", True),
        ("SGLANG_USE_HND_KVCACHE", "1", True),
        ("SGLANG_AITER_KV_CACHE_LAYOUT", "vectorized_5d", True),
        ("SGLANG_AITER_KV_CACHE_LAYOUT", "nhd", False),
        ("SGLANG_REQ_WAITING_TIMEOUT", "5", False),
        ("SGLANG_TEST_RETRACT", "1", False),
        ("SGLANG_LOG_GC", "1", False),
    ],
)
def test_variables(name: str, value: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert bool(sentence(requested())) == refused


def test_timeouts_are_refused_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "5")
    assert "SGLANG_REQ_WAITING_TIMEOUT=5.0 is not supported: each rank reads its own clock" in sentence(
        requested(tp_size=2)
    )


def test_preemption_by_priority_is_refused_with_several_ranks() -> None:
    assert sentence(requested(enable_priority_scheduling=True)) == ""
    assert sentence(requested(tp_size=2, enable_priority_scheduling=True, disable_priority_preemption=True)) == ""
    assert "--enable-priority-scheduling is not supported: each rank orders" in sentence(
        requested(tp_size=2, enable_priority_scheduling=True)
    )


def test_a_limit_of_the_queue_is_refused_with_priorities() -> None:
    assert sentence(requested(max_queued_requests=4)) == ""
    assert "higher priority would end a sample" in sentence(
        requested(max_queued_requests=4, enable_priority_scheduling=True)
    )


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64}, "sparse attention"),
        ({"use_ngram_embedding": True}, "n-gram embeddings"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({}, ""),
    ],
)
def test_models(config: dict[str, Any], what: str) -> None:
    hf_config = SimpleNamespace(**{"architectures": ["Qwen3ForCausalLM"], **config})
    hf_config.get_text_config = lambda: hf_config
    model = SimpleNamespace(
        hf_config=hf_config,
        is_hybrid_swa=config.get("is_hybrid_swa", False),
        use_ngram_embedding=config.get("use_ngram_embedding", False),
        is_encoder_decoder=config.get("is_encoder_decoder", False),
        linear_attn_registry_result=None,
    )
    refusal = refusals.find_in_model(SimpleNamespace(get_model_config=lambda: model))
    assert (what in refusal.what) if refusal is not None else not what


def test_the_documentation_lists_what_is_refused() -> None:
    assert (ROOT / refusal_docs.PAGE).read_text() == refusal_docs.updated((ROOT / refusal_docs.PAGE).read_text()), (
        "docs/limits.md is out of date: run python -m sglang_april.adapter.refusal_docs"
    )
