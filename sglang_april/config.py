"""The `--april-*` flags: one class that drives the command line, the environment and the validation.

The environment variable `SGLANG_APRIL` (a JSON object, one key per flag) is what SGLang's processes share: the
plugin writes the parsed flags there before any child starts, and every process reads them back with `load()`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from sglang_april.api.types import KvPolicy
from sglang_april.flag_values import (
    PREFIX,
    Flag,
    choice,
    concurrency,
    difference,
    directory,
    gigabytes,
    name,
    path,
    seconds,
    setting,
    suggestion,
    switch,
    text,
    whole,
)
from sglang_april.flag_values import (
    ConfigError as ConfigError,
)

ENV = "SGLANG_APRIL"
BYTES_PER_GB = 10**9
BYTES_PER_MB = 2**20
MAX_BODY_MB = 400
"""JSON grows at most 2.25 times as msgpack (`1e9,` → 9 bytes), and SQLite holds 10^9 bytes in a row of the journal."""
MAX_DEFAULT_HOST_BYTES = 64 * BYTES_PER_GB
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container reads its memory limit: cgroup v2 and v1."""


@dataclass(frozen=True)
class AprilConfig:
    """The settings of one server, the same in all of its processes. Each field is a flag."""

    quota: int | None = setting(None, whole(1), "N", "groups (or samples) that end a round whose request has no quota")
    quota_unit: str = setting("group", choice("group", "sample"), "{group,sample}", "what a quota counts and delivers")
    kv: KvPolicy = setting(
        "auto",
        choice("keep", "recompute", "auto"),
        "{keep,recompute,auto}",
        "continue partials on their stored KV, prefill them again under new weights, or (auto) whichever is faster",
    )
    max_staleness: int = setting(
        5, whole(0), "N", "policy versions a group may fall behind before a round must finish it"
    )
    host_gb: float | None = setting(
        None,
        gigabytes,
        "GB",
        "host memory for KV of partials, of all ranks together (default, on each machine: a quarter of its memory, "
        "or of the container's limit, "
        "divided by --april-servers-per-machine, and at most 64 GB)",
    )
    """None: see `default_host_bytes`."""
    servers_per_machine: int = setting(
        1, whole(1), "N", "servers that share this machine's memory, for the default of --april-host-gb (default: 1)"
    )
    disk_dir: str | None = setting(
        None, directory, "DIR", "directory of the disk tier, for this server alone (default: no disk tier)"
    )
    disk_gb: float = setting(0.0, gigabytes, "GB", "size of the disk tier")
    kv_pages: str = setting(
        "full",
        choice("full", "int8"),
        "{full,int8}",
        "format of pages in the host and disk tiers; int8 is lossy and takes about half the bytes (default: full)",
    )
    carry_tokens: int = setting(
        100_000_000, whole(1), "N", "limit of undelivered output tokens, above which new prompts are refused"
    )
    replies: int = setting(2, whole(1), "N", "replies kept per run, for repeated requests with the same round_id")
    reply_gb: float = setting(
        4.0, gigabytes, "GB", "memory for replies that wait for their ack, and the same amount for all other replies"
    )
    max_body_mb: int = setting(
        64, whole(1, MAX_BODY_MB), "MB", "largest body of a request in MiB (default: 64); others get 413"
    )
    concurrency: int | Literal["auto"] | None = setting(
        None,
        concurrency,
        "{N,auto}",
        "samples of one run that run at the same time (default: all slots; auto: found from measured step times)",
    )
    attach: str | None = setting(
        None,
        name,
        "RUN",
        "run of requests to SGLang's own routes that give no run (default: such requests belong to no run)",
    )
    model: str | None = setting(
        None,
        text,
        "PATH",
        "activate the plugin only if --model-path is PATH; other servers stay plain SGLang (for SGLANG_APRIL in the "
        "environment of a job with several servers)",
    )
    park_gb: float | None = setting(
        None,
        gigabytes,
        "GB",
        "KV that ended legs of trajectories keep for the next ones, on all tiers together (default: no such limit)",
    )
    """None: no limit but those of the tiers."""
    version: int | None = setting(
        None,
        whole(0, 2**62),
        "N",
        "policy version of the weights at start (default: 0, or unnamed after a restart with a journal)",
    )
    journal: str | None = setting(None, path, "PATH", "journal file, from which a restarted server restores its state")
    journal_sync: str = setting(
        "normal",
        choice("normal", "full"),
        "{normal,full}",
        "what the journal survives: the death of the process (normal) or also a loss of power (full)",
    )
    shutdown_s: float = setting(30.0, seconds, "S", "time after SIGTERM to store KV, close the journal and end")
    journal_interval: int = setting(256, whole(1), "N", "output tokens of a running sample between two journal records")
    audit: int = setting(
        0, whole(0), "N", "samples of each policy version that a plain prefill rescores (default: 0, none)"
    )
    audit_tolerance: float | None = setting(
        None,
        difference,
        "X",
        "difference of logprobs that counts as noise (default: 0.001 for float32 weights, 0.1 otherwise)",
    )
    cpu_pace: str | None = setting(
        None,
        path,
        "FILE",
        "CPU platform only: a table of step times; forwards end no earlier than on the GPU that it describes",
    )
    audit_strict: bool = setting(
        False, switch, "", "refuse new rounds after a finding, until it is acknowledged", switch=True
    )

    def host_bytes(self, ranks: int, local_ranks: int) -> int:
        """The cap of the host tier in bytes, of all ranks together; `local_ranks` of them run on this machine."""
        if self.host_gb is not None:
            return int(self.host_gb * BYTES_PER_GB)
        return default_host_bytes(self.servers_per_machine) * ranks // local_ranks

    @property
    def disk_bytes(self) -> int:
        """The cap of the disk tier in bytes."""
        return int(self.disk_gb * BYTES_PER_GB)

    @property
    def reply_bytes(self) -> int:
        """The cap of kept replies in bytes."""
        return int(self.reply_gb * BYTES_PER_GB)

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request in bytes."""
        return self.max_body_mb * BYTES_PER_MB


FLAGS: tuple[Flag, ...] = tuple(Flag(field.name, **field.metadata) for field in dataclasses.fields(AprilConfig))
_BY_FIELD = {flag.field: flag for flag in FLAGS}
_NEEDS = {"audit_tolerance": "audit", "audit_strict": "audit", "journal_sync": "journal", "journal_interval": "journal"}
"""Settings that have no effect without another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's `--help`, as text values that `from_mapping` checks."""
    group = parser.add_argument_group("sglang-april", "native partial-rollout scheduling")
    for flag in FLAGS:
        text = flag.described(getattr(AprilConfig, flag.field))
        group.add_argument(flag.option, dest=f"april_{flag.field}", metavar=flag.metavar, help=text, **flag.arity)


def is_active(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> bool:
    """Whether an argument or the environment activates the plugin (`explicit-activation`)."""
    argv = sys.argv[1:] if argv is None else argv
    env = os.environ if env is None else env
    return bool(env.get(ENV)) or any(arg.startswith(PREFIX) for arg in argv)


def from_argv(argv: Sequence[str]) -> dict[str, str]:
    """The plugin's flags in a command line of SGLang, as typed: field → text.

    Raises:
        ConfigError: an `--april-*` argument is not a flag of the plugin.
    """
    parser = _QuietParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in FLAGS:
        parser.add_argument(flag.option, dest=flag.field, **flag.arity)
    known, rest = parser.parse_known_args(list(argv))
    for arg in rest:
        if arg.startswith(PREFIX):
            option = arg.split("=")[0]
            hint = suggestion(option, [flag.option for flag in FLAGS])
            raise ConfigError(f"{option} is not a flag of sglang-april{hint}")
    return vars(known)


def from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """The flags in the environment variable `SGLANG_APRIL`: field → JSON value; empty if it is not set.

    Raises:
        ConfigError: the variable is not a JSON object.
    """
    text = env.get(ENV)
    if not text:
        return {}
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f'{ENV} must be a JSON object such as {{"quota": 32}}, not {text!r}')
    return values


def from_mapping(values: Mapping[str, Any]) -> AprilConfig:
    """Checked settings from flags as typed or as JSON; None means that a flag was not given.

    Raises:
        ConfigError: it names the flag.
    """
    checked: dict[str, Any] = {}
    for field, value in values.items():
        if field not in _BY_FIELD:
            raise ConfigError(f"{ENV} has no setting {field!r}{suggestion(field, _BY_FIELD)}")
        if value is not None:
            checked[field] = _BY_FIELD[field].read(value)
    if (checked.get("disk_dir") is None) != (not checked.get("disk_gb")):
        raise ConfigError("--april-disk-dir and --april-disk-gb must be set together")
    for field, needed in _NEEDS.items():
        default = getattr(AprilConfig, field)  # published settings contain the defaults
        if checked.get(field, default) != default and not checked.get(needed):
            raise ConfigError(f"{_BY_FIELD[field].option} has no effect without {_BY_FIELD[needed].option}")
    return AprilConfig(**checked)


def default_host_bytes(servers: int) -> int:
    """Default host tier of one server here, in bytes: its share of a quarter of the memory, at most 64 GB."""
    return min(MAX_DEFAULT_HOST_BYTES, _memory_bytes() // 4 // servers)


def _memory_bytes() -> int:
    """The machine's memory, or the container's limit if that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # the other version; `max`
            memory = min(memory, int(limit.read_text()))
    return memory


def publish(values: Mapping[str, Any]) -> AprilConfig:
    """Check settings and write them to the environment, which child processes inherit."""
    settings = from_mapping(values)
    os.environ[ENV] = json.dumps(dataclasses.asdict(settings))
    return settings


def load() -> AprilConfig:
    """The settings of this server, as the plugin published them."""
    return from_mapping(from_env(os.environ))


class _QuietParser(argparse.ArgumentParser):
    """Reports a wrong command line as a ConfigError instead of printing a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))
