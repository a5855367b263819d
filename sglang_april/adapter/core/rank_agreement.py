"""At the start, TP ranks agree on settings, code and budgets (`rank-determinism`).

Ranks on other machines are started by separate commands from separate installations. A rank that differs in anything
that decisions depend on would eventually wait in a different collective than the others.
"""

import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.scheduler import Scheduler

import april_kernels
import sglang_april
from sglang_april.adapter import versions
from sglang_april.adapter.core import arguments
from sglang_april.adapter.core.arguments import LOGGING, PROCESS, REFUSED_FEATURE, REFUSED_MODEL, ROUTES
from sglang_april.adapter.core.build_store import TierBudgets
from sglang_april.adapter.shapes.installed import shape
from sglang_april.config import FLAGS, AprilConfig
from sglang_april.kv.page_format import PageFormat

PATHS = ("disk_dir", "journal")
"""Flags whose values may differ: only whether they are given is compared."""
OF_MACHINE = ("host_gb", "disk_gb", "servers_per_machine")
"""Flags that budgets depend on: the smallest budget counts."""
UNCOMPARED = (REFUSED_FEATURE, REFUSED_MODEL, PROCESS, LOGGING, ROUTES)
"""Reasons of the arguments that schedulers do not decide by."""
OF_RANK = frozenset(
    [
        "model_path",
        "tokenizer_path",
        "download_dir",
        "decrypted_config_file",
        "weight_cache_socket",
        "kt_weight_path",
        "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "engine_info_bootstrap_port",
        "gated_launch_port",
        "nccl_port",
        "dist_init_addr",
        "node_rank",
        "mooncake_ib_device",
        "mem_fraction_static",
    ]
)
"""Arguments that machines or ranks set differently. Of the memory, the tokens of the pool are compared."""
ARGUMENTS = tuple(
    name for rule in arguments.ARGUMENTS if rule.why not in UNCOMPARED for name in rule.names if name not in OF_RANK
)
"""SGLang's arguments that its scheduling, its pools, its collectives or the sampled tokens may depend on."""

ENVIRONMENT = (
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
    "SGLANG_ENABLE_WAITING_PREFIX_REFRESH",
    "SGLANG_EXACT_CHUNK_FILL",
    "SGLANG_INIT_NEW_TOKEN_RATIO",
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "SGLANG_RETRACT_DECODE_STEPS",
    "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE",
    "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT",
    "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_NONE",
    "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY",
    "SGLANG_TEST_RETRACT",
    "SGLANG_TEST_RETRACT_INTERVAL",
)
"""Environment variables by which SGLang receives, admits and retracts requests."""


class RankReport(NamedTuple):
    """The settings of one rank; `compared` maps the names that a refusal uses to values."""

    compared: dict[str, str]
    budgets: TierBudgets
    gpu: str
    """UUID of its GPU; empty on a CPU."""


class Agreement(NamedTuple):
    """The values that all ranks share."""

    budgets: TierBudgets
    """The smallest of all ranks."""
    gpus: list[str]
    """UUIDs of the GPUs, by rank; empty on a CPU."""


def agree(s: Scheduler, config: AprilConfig, page_format: PageFormat, budgets: TierBudgets) -> Agreement:
    """Compare the ranks. A collective call during the start.

    Raises:
        SystemExit: the ranks differ; the sentence names what differs, both values and the rank.
    """
    ranks = shape.tp_size(s)
    gathered: list[Any] = [None] * ranks
    mine = RankReport(_compared(s, config, page_format), budgets, _gpu())
    if ranks == 1:
        return Agreement(budgets, [mine.gpu] if mine.gpu else [])
    torch.distributed.all_gather_object(gathered, mine, group=s.tp_cpu_group)
    if difference := find_difference([report.compared for report in gathered]):
        raise SystemExit(f"sglang-april: {difference}")
    all_budgets = [report.budgets for report in gathered]
    smallest = budgets._replace(host=min(b.host for b in all_budgets), disk=min(b.disk for b in all_budgets))
    return Agreement(smallest, [report.gpu for report in gathered if report.gpu])


def _gpu() -> str:
    """SGLang has made this rank's GPU the current one."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else ""


def find_difference(ranks: list[dict[str, str]]) -> str:
    """The first difference between rank 0 and another rank, in one sentence; empty if there is none."""
    for rank, values in enumerate(ranks):
        for name in {**ranks[0], **values}:
            expected, found = ranks[0].get(name, "nothing"), values.get(name, "nothing")
            if found != expected:
                return f"all TP ranks must agree on {name}, but rank {rank} has {found} and rank 0 has {expected}."
    return ""


def _compared(s: Scheduler, config: AprilConfig, page_format: PageFormat) -> dict[str, str]:
    flags = {flag.option: getattr(config, flag.field) for flag in FLAGS if flag.field not in OF_MACHINE}
    flags |= {flag.option: "a path" if getattr(config, flag.field) else None for flag in FLAGS if flag.field in PATHS}
    args = shape.resolved(s.server_args)
    given = {_option(name): getattr(args, name) for name in ARGUMENTS if hasattr(args, name)}
    found: dict[str, Any] = {
        "the reviewed source of sglang": versions.installed()["sglang"],
        "the files of sglang that sglang-april relies on (their digest)": versions.source_digest(),
        "the version of torch": torch.__version__,
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
        "the sources of sglang-april (their digest)": sources_digest(),
        **flags,
        **given,
        **{name: os.environ.get(name) for name in ENVIRONMENT},
        "the shape of the model": _model(s),
        "the tokens of the KV pool": s.max_total_num_tokens,
        "the number of slots": s.max_running_requests,
        "the bytes of a stored page": 4 * page_format.page_words,
    }
    return {name: repr(value) if isinstance(value, str) else str(value) for name, value in found.items()}


def _option(argument: str) -> str:
    return "--" + argument.replace("_", "-")


def _model(s: Scheduler) -> str:
    config = s.model_config
    shape = (config.num_hidden_layers, config.hidden_size, config.vocab_size, config.context_len)
    return f"{'/'.join(config.hf_config.architectures or ())} {shape}"


@functools.cache
def sources_digest() -> str:
    """Digest of the Python files of the plugin and its kernels."""
    digest = hashlib.blake2b(digest_size=8)
    for package in (sglang_april, april_kernels):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()
