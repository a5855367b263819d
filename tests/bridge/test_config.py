"""Configuration from YAML and flags, slime's spellings, and validation messages."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_april import config as server
from trainer_bridge import config_reference
from trainer_bridge.args import config_parser, load
from trainer_bridge.cli import main
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.sampling import AGENT_PARAMETERS, FIELD_OF_PARAMETER, agent_params, rollout_params
from trainer_bridge.validate import check, check_on_policy, modified_sampling

REQUIRED = {"hf_checkpoint": "model", "prompt_data": "data.jsonl"}


def config(**fields: Any) -> Config:
    return load(None, {**REQUIRED, **fields})


def from_flags(*flags: str) -> Config:
    return load(
        None, vars(config_parser().parse_args(["--hf-checkpoint", "model", "--prompt-data", "data.jsonl", *flags]))
    )


def test_flags_of_slime_are_accepted() -> None:
    made = from_flags(
        *("--partial-rollout", "--rollout-batch-size", "32", "--over-sampling-batch-size", "64"),
        *("--n-samples-per-prompt", "8", "--rollout-max-response-len", "16384", "--rollout-temperature", "0.8"),
        *(
            "--global-batch-size",
            "256",
            "--advantage-estimator",
            "gspo",
            "--eps-clip",
            "0.2",
            "--eps-clip-high",
            "0.28",
        ),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--num-rollout", "3000", "--lr", "1e-6", "--tensor-model-parallel-size", "1", "--eval-interval", "20"),
    )
    assert (made.partial_rollout, made.rollout_batch_size, made.pool_size, made.lr) == (True, 32, 64, 1e-6)
    assert made.loss.clip_range == (0.2, 0.28)


def test_flags_with_underscores_none_lists_and_negation() -> None:
    made = from_flags("--label_key", "none", "--no-partial-rollout", "--rollout-stop-token-ids", "2", "7")
    assert (made.label_key, made.partial_rollout, made.rollout_stop_token_ids) == (None, False, [2, 7])
    assert made.staleness_bound == 0


def test_list_flags_accept_several_values_or_repetition() -> None:
    made = from_flags("--server-flags=--tp-size=2", "--server-flags=--mem-fraction-static=0.7")
    assert made.server_flags == ["--tp-size=2", "--mem-fraction-static=0.7"]
    made = from_flags("--rollout-stop-token-ids", "2", "7", "--rollout-stop-token-ids", "9", "--rollout-stop", "a", "b")
    assert (made.rollout_stop_token_ids, made.rollout_stop) == ([2, 7, 9], ["a", "b"])


def test_flag_overrides_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("hf_checkpoint: m\nprompt_data: d\nlr: 1.0e-5\nrollout_batch_size: 8\n")
    made = load(tmp_path / "c.yaml", {"lr": "2e-5"})
    assert (made.lr, made.rollout_batch_size) == (2e-5, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf_checkpoint: m\nprompt_data: d\nrollout_batchsize: 8", "rollout_batchsize"),
        ("hf_checkpoint: m", "prompt_data"),
        ("hf_checkpoint: m\nprompt_data: d\nlr: fast", "lr"),
        ("hf_checkpoint: m\nprompt_data: d\nlr: -1", "lr"),
        ("hf_checkpoint: m\nprompt_data: d\nkv: cherish", "kv"),
        ("hf_checkpoint: m\nprompt_data: d\nloss: {correction: none}", "unknown field loss"),
        ("hf_checkpoint: m\nprompt_data: d\ncorrection: tis", "^correction tis compares"),
        ("- 1", "fields by name"),
        ("a: [", "c.yaml"),
    ],
)
def test_invalid_file_is_refused_with_the_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "c.yaml", {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quota_unit": "sample"}, "quota_unit"),
        ({"n_samples_per_prompt": 1}, "n_samples_per_prompt"),
        (
            {"n_samples_per_prompt": 1, "dynamic_sampling": True, "advantage_estimator": "ppo"},
            "dynamic_sampling: needs",
        ),
        (
            {"quota_unit": "sample", "advantage_estimator": "ppo", "group_reward": "m:f"},
            "group_reward: needs quota_unit: group",
        ),
        ({"over_sampling_batch_size": 4, "rollout_batch_size": 8}, "over_sampling_batch_size"),
        ({"rollout_top_p": 0.9}, "top_p"),
        ({"rollout_top_k": 20}, "top_k"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"sampling_params": {"regex": "a*"}}, "regex"),
        ({"sampling_params": {"temperature": 0.7}}, "sampling_params: temperature has .* rollout_temperature$"),
        (
            {"sampling_params": {"max_new_tokens": 8}},
            "sampling_params: max_new_tokens has .* rollout_max_response_len$",
        ),
        ({"sampling_params": {"top_p": 0.9}, "allow_modified_sampling": True}, "sampling_params: top_p has"),
        ({"eval_interval": 5}, "eval_prompt_data"),
        ({"correction": "tis"}, "proximal"),
        ({"kl_loss_coef": 0.1}, "kl_loss_coef"),
        ({"strict_on_policy": True, "after_quota": "continue"}, "after_quota"),
        ({"strict_on_policy": True, "global_batch_size": 64}, "global_batch_size"),
        (
            {
                "strict_on_policy": True,
                "global_batch_size": 256,
                "quota_unit": "sample",
                "advantage_estimator": "reinforce",
            },
            "global_batch_size: strict_on_policy",
        ),
        ({"trainer_processes": 3, "tensor_model_parallel_size": 2}, "tensor_model_parallel_size"),
        ({"overlong_buffer_len": 1024}, "overlong_buffer_len"),
    ],
)
def test_contradicting_fields_are_refused_with_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(**fields))


def test_modified_sampling_is_listed_and_can_be_allowed() -> None:
    made = config(rollout_top_p=0.9, sampling_params={"min_p": 0.0}, allow_modified_sampling=True)
    check(made)
    assert modified_sampling(made) == ["top_p"]


def test_sampling_parameters_with_a_field_are_the_ones_that_fields_set() -> None:
    fields = {"rollout_top_p": 0.9, "rollout_top_k": 5, "rollout_stop": ["a"], "rollout_stop_token_ids": [1]}
    assert rollout_params(config(**fields)).keys() == FIELD_OF_PARAMETER.keys()
    assert set(FIELD_OF_PARAMETER.values()) <= {field.name for field in config_reference.references()}


def test_configuration_round_trips_through_yaml(tmp_path: Path) -> None:
    made = config(rollout_stop=["\n"], label_key=None)
    (tmp_path / "c.yaml").write_text(made.as_yaml())
    assert load(tmp_path / "c.yaml", {}) == made


def test_yaml_and_help_list_loss_settings_between_the_other_fields() -> None:
    names = list(yaml.safe_load(config(advantage_estimator="dapo").as_yaml()))
    assert names == [field.name for field in config_reference.references()]
    assert names[names.index("agent_timeout") + 1] == "advantage_estimator"
    assert names[names.index("seq_mask_high") + 1] == "kl_loss_coef"


def test_api_key_is_redacted() -> None:
    assert "hush" not in config(api_key="hush").as_yaml()


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001", "'1e-6'"])
def test_yaml_numbers_may_lack_a_dot(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(f"hf_checkpoint: m\nprompt_data: d\nlr: {text}\n")
    assert load(tmp_path / "c.yaml", {}).lr == 1e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout_batchsize: 8", "^unknown field rollout_batchsize; did you mean rollout_batch_size\\?$"),
        ("rollout_batch_size: many", "^rollout_batch_size: expected int, got 'many'$"),
        ("rollout_batch_size: 0", "^rollout_batch_size: expected int >= 1, got 0$"),
        ("kv: cherish", "^kv: expected keep, recompute, auto, got 'cherish'$"),
        ("partial_rollout: 1e-6", "^partial_rollout: expected bool, got '1e-6'$"),
        ("zzz: 1", "^unknown field zzz$"),
    ],
)
def test_wrong_value_names_its_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(f"hf_checkpoint: m\nprompt_data: d\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "c.yaml", {})


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^hf_checkpoint: is required, as a field of --config or as --hf-checkpoint$"
    ):
        load(None, {"prompt_data": "d"})
    with pytest.raises(ConfigError, match=r"^--config .*none.yaml: No such file or directory$"):
        load(tmp_path / "none.yaml", {})


def test_unknown_flag_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--rollout-batchsize", "8"])
    assert stopped.value.code == 2
    assert "did you mean --rollout-batch-size?" in capsys.readouterr().err


def test_every_field_has_a_section_and_a_description() -> None:
    for field in config_reference.references():
        assert field.section, field.name
        assert field.description.endswith("."), field.name
    help_text = " ".join(config_parser().format_help().split())
    for field in config_reference.references():
        assert field.description.split(". ")[0].removesuffix(".")[:60] in help_text, field.name


@pytest.mark.parametrize("path", config_reference.PAGES, ids=lambda path: path.stem)
def test_reference_page_is_current(path: Path) -> None:
    assert path.read_text() == config_reference.PAGES[path]()


def test_settings_on_the_page_of_flags_are_accepted() -> None:
    """Its JSON is what its flags mean, and it has a row for each flag and no other."""
    page = config_reference.server_flags_page()
    examples = page.replace("`--april-`", "").replace("\n", " ").partition("## All flags")[0]
    flags, *objects = re.findall(r"`(--april-\S+ .*?|\{.*?\})`", examples)
    argv, (env, on_each) = server.from_argv(flags.split()), [server.from_env({server.ENV: given}) for given in objects]
    assert server.from_mapping(argv) == server.from_mapping(env) != server.AprilConfig()
    assert server.from_mapping(on_each).servers_per_machine == 8
    rows = re.findall(r"^\| `(--april-[a-z-]+)` \|", page, re.MULTILINE)
    assert rows == [flag.option for flag in server.FLAGS]


def test_invalid_configuration_is_reported_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hf-checkpoint", "m", "--prompt-data", "d", "--quota-unit", "sample"]) == 2
    assert "quota_unit: sample" in capsys.readouterr().err


ON_POLICY = {"off_policy_share": 0.0, "hybrid_share": 0.0, "ratio_max": 1.00003, "ratio_min": 0.99996}


@pytest.mark.parametrize(
    ("fields", "exact", "message"),
    [
        ({}, True, None),
        ({"off_policy_share": 0.25}, False, r"25\.00% of the tokens are off-policy"),
        ({"hybrid_share": 0.25}, False, "off-policy"),
        ({"ratio_max": 1.0002}, True, r"first ratio is up to 0\.0002 from 1"),
        ({"ratio_min": 0.998}, True, r"first ratio is up to 0\.002 from 1"),
        ({"ratio_max": float("nan")}, True, "first ratio"),
        ({"ratio_max": 1.01}, False, None),
    ],
)
def test_strict_on_policy_is_checked(fields: dict[str, float], exact: bool, message: str | None) -> None:
    rows = [{**ON_POLICY, **fields}, ON_POLICY]
    check_on_policy([{}], exact=exact)
    if message is None:
        check_on_policy(rows, exact=exact)
    else:
        with pytest.raises(RuntimeError, match=message):
            check_on_policy(rows, exact=exact)


def test_sampling_params_of_an_agent_have_the_names_of_chat_completions() -> None:
    """SGLang's routes ignore other names."""
    fields = {"agent": "m:f", "allow_modified_sampling": True}
    made = config(**fields, sampling_params={"min_new_tokens": 8, "regex": "a+"}, rollout_stop_token_ids=[7])
    extra = {
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 8,
        "regex": "a+",
        "stop_token_ids": [7],
    }
    assert agent_params(made)["extra_body"] == extra
    with pytest.raises(ConfigError, match="sampling_params: json_schema: is not possible with an agent"):
        check(config(**fields, sampling_params={"json_schema": "{}"}))


def test_chat_completions_have_the_parameters_of_agents() -> None:
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    assert set(AGENT_PARAMETERS.values()) <= protocol.ChatCompletionRequest.model_fields.keys()
