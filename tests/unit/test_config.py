"""The flags: what is accepted, what is refused, and that every process reads back the same."""

import argparse
import json
from pathlib import Path

import pytest

from sglang_april import config


def read(*argv: str, env: str = "") -> config.AprilConfig:
    return config.from_mapping(config.from_env({config.ENV: env}) | config.from_argv(argv))


def test_defaults_are_those_of_the_design() -> None:
    settings = read()
    assert (settings.quota, settings.quota_unit, settings.kv, settings.max_staleness) == (None, "group", "auto", 5)
    assert (settings.replies, settings.reply_gb, settings.concurrency, settings.version) == (2, 4.0, None, None)
    assert (settings.host_gb, settings.servers_per_machine) == (None, 1)
    assert 0 < settings.host_bytes(1, 1) <= 64 * 10**9
    assert settings.max_body_bytes == 64 * 2**20


def test_flags_are_parsed_among_sglang_flags() -> None:
    settings = read("--model-path", "m", "--april-quota", "32", "--tp-size", "2", "--april-kv=recompute")
    assert (settings.quota, settings.kv) == (32, "recompute")


def test_command_line_overrides_the_environment() -> None:
    settings = read("--april-quota", "8", env='{"quota": 32, "host_gb": 1.5}')
    assert (settings.quota, settings.host_bytes(2, 1)) == (8, 1_500_000_000)


@pytest.mark.parametrize(
    ("memory_gb", "servers", "ranks", "local_ranks", "host_gb"),
    [
        (1000, 1, 8, 8, 64),
        (1000, 8, 1, 1, 31.25),
        (2000, 8, 1, 1, 62.5),
        (100, 1, 1, 1, 25),
        (100, 2, 16, 8, 25),
        (1000, 1, 16, 8, 128),
    ],
)
def test_default_host_memory_is_this_servers_share_of_its_machines(
    monkeypatch: pytest.MonkeyPatch, memory_gb: int, servers: int, ranks: int, local_ranks: int, host_gb: float
) -> None:
    """Servers of one machine together pin at most a quarter of its memory; two machines hold twice as much as one."""
    monkeypatch.setattr(
        config.os, "sysconf", lambda name: {"SC_PHYS_PAGES": memory_gb * 10**6, "SC_PAGE_SIZE": 1000}[name]
    )
    monkeypatch.setattr(config, "CGROUP_LIMITS", ())
    assert read(f"--april-servers-per-machine={servers}").host_bytes(ranks, local_ranks) == host_gb * 10**9


@pytest.mark.parametrize(("limit", "host_gb"), [("8000000000", 2), ("max", 25), ("9223372036854771712", 25)])
def test_default_host_memory_is_a_share_of_the_containers_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, host_gb: int
) -> None:
    """A server that takes more than its container may have is killed by the kernel, without a message."""
    monkeypatch.setattr(config.os, "sysconf", lambda name: {"SC_PHYS_PAGES": 10**8, "SC_PAGE_SIZE": 1000}[name])
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(config, "CGROUP_LIMITS", (tmp_path / "memory.limit_in_bytes", tmp_path / "memory.max"))
    assert read().host_bytes(1, 1) == host_gb * 10**9


def test_every_kv_policy_is_accepted() -> None:
    assert [read("--april-kv", kv).kv for kv in ("keep", "recompute", "auto")] == ["keep", "recompute", "auto"]


def test_concurrency_takes_a_number_or_auto() -> None:
    assert read("--april-concurrency", "16").concurrency == 16
    assert read("--april-concurrency", "auto").concurrency == "auto"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--april-quota", "0"], "--april-quota must be a whole number from 1"),
        (["--april-quota", "-3"], "--april-quota must be a whole number from 1"),
        (["--april-quota", "2147483648"], "--april-quota must be a whole number from 1"),
        (["--april-quota", "4.5"], "--april-quota must be a whole number"),
        (["--april-quota", "many"], "--april-quota must be a whole number"),
        (["--april-quota"], "--april-quota: expected one argument"),
        (["--april-quota-unit", "token"], "--april-quota-unit must be one of group, sample"),
        (["--april-kv", "drop"], "--april-kv must be one of keep, recompute, auto"),
        (["--april-max-staleness", "-1"], "--april-max-staleness must be a whole number from 0"),
        (["--april-host-gb", "nan"], "--april-host-gb must be a number of gigabytes"),
        (["--april-host-gb", "-1"], "--april-host-gb must be a number of gigabytes"),
        (["--april-reply-gb", "inf"], "--april-reply-gb must be a number of gigabytes"),
        (["--april-max-body-mb", "401"], "--april-max-body-mb must be a whole number from 1 to 400"),
        (["--april-replies", "0"], "--april-replies must be a whole number from 1"),
        (["--april-version", "-1"], "--april-version must be a whole number from 0"),
        (["--april-concurrency", "0"], "--april-concurrency must be a whole number"),
        (["--april-disk-dir", "/no/such/folder"], "--april-disk-dir must be a directory that exists"),
        (["--april-disk-dir", "/dev/null", "--april-disk-gb", "1"], "--april-disk-dir must be a directory that exists"),
        (["--april-disk-gb", "1"], "--april-disk-dir and --april-disk-gb must be set together"),
        (["--april-disk-dir", "/tmp"], "--april-disk-dir and --april-disk-gb must be set together"),
        (["--april-journal", ""], "--april-journal must be the path of a file"),
        (["--april-journal-sync", "never"], "--april-journal-sync must be one of normal, full"),
        (["--april-journal-sync", "full"], "--april-journal-sync has no effect without --april-journal"),
        (["--april-journal-interval", "16"], "--april-journal-interval has no effect without --april-journal"),
        (["--april-audit-strict"], "--april-audit-strict has no effect without --april-audit"),
        (["--april-audit-tolerance", "1", "--april-audit", "0"], "--april-audit-tolerance has no effect without"),
        (["--april-qouta", "4"], "--april-qouta is not a flag of sglang-april; did you mean --april-quota?"),
        (["--april-quot", "4"], "--april-quot is not a flag of sglang-april"),
    ],
)
def test_a_wrong_flag_is_named_in_one_sentence(argv: list[str], reason: str) -> None:
    with pytest.raises(config.ConfigError) as error:
        read(*argv)
    assert str(error.value).startswith(reason)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["nonsense", "[1]", "32", '{"quota": '])
def test_environment_without_a_json_object_is_refused(text: str) -> None:
    with pytest.raises(config.ConfigError, match="SGLANG_APRIL must be a JSON object"):
        read(env=text)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"quota": True}, "--april-quota must"),
        ({"quota": 4.0}, "--april-quota must"),
        ({"host_gb": True}, "--april-host-gb must"),
        ({"host_gb": []}, "--april-host-gb must"),
        ({"kv": 1}, "--april-kv must"),
        ({"quotas": 1}, "SGLANG_APRIL has no setting 'quotas'; did you mean quota?"),
        ({"journal": 1}, "--april-journal must be the path of a file"),
    ],
)
def test_the_environment_is_checked_like_the_flags(values: dict[str, object], reason: str) -> None:
    with pytest.raises(config.ConfigError, match=reason):
        read(env=json.dumps(values))


def test_null_in_the_environment_means_flag_not_given() -> None:
    assert read(env='{"quota": null, "host_gb": null}').host_gb is None


def test_published_settings_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.ENV, "")
    argv = ["--april-quota", "7", "--april-kv", "auto", "--april-host-gb", "0.25"]
    published = config.publish(config.from_argv(argv))
    assert config.load() == published
    assert config.publish(config.from_argv([*argv, "--april-audit=8", "--april-audit-strict"])) == config.load()
    assert config.publish(config.from_argv([*argv, "--april-journal=/j", "--april-journal-sync=full"])) == config.load()
    assert config.publish(config.from_env({config.ENV: json.dumps({"quota": 7})})).quota == 7


@pytest.mark.parametrize(
    ("argv", "env", "active"),
    [
        ([], {}, False),
        (["--model-path", "april"], {}, False),
        ([], {"SGLANG_APRIL": ""}, False),
        (["--april-quota", "4"], {}, True),
        (["--april-quota=4"], {}, True),
        ([], {"SGLANG_APRIL": "{}"}, True),
    ],
)
def test_activation(argv: list[str], env: dict[str, str], active: bool) -> None:
    assert config.is_active(argv, env) is active


def test_help_shows_every_flag() -> None:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    text = parser.format_help()
    assert all(flag.option in text for flag in config.FLAGS)


def test_help_names_the_default_of_every_flag() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    config.add_arguments(parser)
    texts = {action.option_strings[0]: action.help or "" for action in parser._actions}
    assert [option for option, text in texts.items() if "default" not in text] == []
    ends = {
        "--april-kv": "(default: auto)",
        "--april-reply-gb": "(default: 4)",
        "--april-shutdown-s": "(default: 30)",
        "--april-journal": "(default: none)",
        "--april-audit-strict": "(default: off)",
        "--april-audit": "(default: 0, none)",
    }
    assert {option: texts[option][-len(end) :] for option, end in ends.items()} == ends
