"""At the start, ranks agree on settings, code and budgets, or all end with one sentence that names what differs."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_april.adapter import versions
from sglang_april.adapter.core import arguments, hooks_args, rank_agreement
from sglang_april.adapter.core.build_store import TierBudgets
from sglang_april.config import FLAGS, AprilConfig

FORMAT: Any = SimpleNamespace(page_words=256)


def scheduler(**changes: Any) -> Any:
    given = dict.fromkeys(rank_agreement.ARGUMENTS) | changes
    hf = SimpleNamespace(architectures=["Qwen3ForCausalLM"])
    return SimpleNamespace(
        ps=SimpleNamespace(tp_size=2),
        server_args=SimpleNamespace(**given),
        model_config=SimpleNamespace(
            hf_config=hf, num_hidden_layers=2, hidden_size=8, vocab_size=100, context_len=changes.pop("context_len", 64)
        ),
        max_total_num_tokens=1000,
        max_running_requests=8,
        tp_cpu_group=None,
    )


def agreed(monkeypatch: pytest.MonkeyPatch, mine: tuple[Any, ...], other: tuple[Any, ...]) -> TierBudgets:
    """Rank 0 has `mine`, rank 1 `other`: (scheduler, settings, budgets)."""

    def gather(out: list[Any], report: Any, group: Any) -> None:
        out[:] = [report, rank_agreement.RankReport(rank_agreement._compared(other[0], other[1], FORMAT), other[2], "")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return rank_agreement.agree(mine[0], mine[1], FORMAT, mine[2]).budgets


def test_budgets_are_the_smallest_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with less memory, or another path of the disk tier, is no difference."""
    mine = (scheduler(), AprilConfig(host_gb=8, disk_dir="/a", disk_gb=1), TierBudgets(320, 160, 16))
    other = (scheduler(), AprilConfig(host_gb=4, disk_dir="/b", disk_gb=2), TierBudgets(160, 320, 16))
    assert agreed(monkeypatch, mine, other) == TierBudgets(160, 160, 16)


BUDGETS = TierBudgets(16, 0, 16)


def test_ranks_exchange_the_uuids_of_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer compares them with its own GPU: the current one of each rank, by rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid {index}"))
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda out, mine, group: out.__setitem__(slice(None), [mine._replace(gpu="uuid 2"), mine]),
    )
    one = scheduler()
    assert rank_agreement.agree(one, AprilConfig(), FORMAT, BUDGETS).gpus == ["uuid 2", "uuid 3"]
    one.ps.tp_size = 1
    assert rank_agreement.agree(one, AprilConfig(), FORMAT, BUDGETS).gpus == ["uuid 3"]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ((scheduler(), AprilConfig(kv="keep")), "--april-kv, but rank 1 has 'keep' and rank 0 has 'auto'"),
        ((scheduler(), AprilConfig(quota=3)), "--april-quota, but rank 1 has 3 and rank 0 has None"),
        ((scheduler(), AprilConfig(journal="/j")), "--april-journal, but rank 1 has 'a path' and rank 0 has None"),
        ((scheduler(page_size=16), AprilConfig()), "--page-size, but rank 1 has 16 and rank 0 has None"),
    ],
)
def test_difference_is_named_with_both_values_and_the_rank(
    monkeypatch: pytest.MonkeyPatch, other: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        agreed(monkeypatch, (scheduler(), AprilConfig(), BUDGETS), (*other, BUDGETS))
    assert str(stopped.value) == f"sglang-april: all TP ranks must agree on {sentence}."


def test_versions_and_sources_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = rank_agreement._compared(scheduler(), AprilConfig(), FORMAT)
    monkeypatch.setattr(rank_agreement, "sources_digest", lambda: "0123")
    found = rank_agreement.find_difference([mine, mine, rank_agreement._compared(scheduler(), AprilConfig(), FORMAT)])
    assert "the sources of sglang-april (their digest), but rank 2 has '0123' and rank 0 has '" in found
    monkeypatch.undo()
    other = {**versions.installed(), "sglang": "0.5.16"}
    monkeypatch.setattr(versions, "installed", lambda: other)
    found = rank_agreement.find_difference([mine, rank_agreement._compared(scheduler(), AprilConfig(), FORMAT)])
    assert "the reviewed source of sglang, but rank 1 has '0.5.16'" in found
    monkeypatch.undo()
    monkeypatch.setattr(versions, "source_digest", lambda: "0123")
    found = rank_agreement.find_difference([mine, rank_agreement._compared(scheduler(), AprilConfig(), FORMAT)])
    assert "the files of sglang that sglang-april relies on (their digest), but rank 1 has '0123'" in found


def test_every_flag_is_compared_or_may_differ_between_machines() -> None:
    compared = rank_agreement._compared(scheduler(), AprilConfig(), FORMAT)
    exempt = {flag.option for flag in FLAGS if flag.field in rank_agreement.OF_MACHINE}
    assert {flag.option for flag in FLAGS} - compared.keys() == exempt


def test_every_reviewed_argument_is_compared_or_may_differ() -> None:
    """An argument that is reviewed for a new release is compared, unless its reason says that no scheduler reads it."""
    reviewed = {name: rule.why for rule in arguments.ARGUMENTS for name in rule.names}
    left = reviewed.keys() - set(rank_agreement.ARGUMENTS)
    assert {reviewed[name] for name in left - rank_agreement.OF_RANK} == set(rank_agreement.UNCOMPARED)
    assert reviewed.keys() >= rank_agreement.OF_RANK
    assert {"page_size", "torchao_config", "constrained_json_whitespace_pattern"} <= set(rank_agreement.ARGUMENTS)


def test_variables_that_tune_the_scheduling_are_compared() -> None:
    """Ranks that skip different polls for requests wait in different collectives."""
    from sglang.srt.environ import envs

    tuning = {name for name in vars(type(envs)) if name.startswith("SGLANG_SCHEDULER_RECV_SKIPPER_")}
    assert tuning
    assert tuning <= set(rank_agreement.ENVIRONMENT)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_only_the_first_machine_needs_the_journal_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_rank: int
) -> None:
    settings = AprilConfig(journal=tmp_path / "missing" / "journal")
    monkeypatch.setattr(hooks_args.config, "load", lambda: settings)
    for check in ("find", "find_in_model", "find_pace"):
        monkeypatch.setattr(hooks_args.refusals, check, lambda _: None)
    hooks_args._probe_journal.cache_clear()
    refused = pytest.raises(SystemExit, match="its folder does not exist") if node_rank == 0 else nullcontext()
    with refused:
        hooks_args.refuse_resolved(SimpleNamespace(model_path="model", node_rank=node_rank))
    hooks_args._probe_journal.cache_clear()
