"""Restores the journal's state on every rank after a restart (`restart-loses-nothing`).

KV of restored samples is recovered from the disk tier; all other files in its directory are removed.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.build_store import key_of
from sglang_april.adapter.core.encoded_params import decode_params
from sglang_april.adapter.core.request import has_grammar
from sglang_april.adapter.shapes.installed import shape
from sglang_april.config import AprilConfig
from sglang_april.kv.disk_tier import DiskError, DiskTier
from sglang_april.kv.kv_pages import StoredKv
from sglang_april.recovery.journal import Journal, JournalError
from sglang_april.recovery.journal_snapshot import JournalSnapshot, SnapshotGroup
from sglang_april.recovery.kv_recovery import KvSearch, Outcome, combine_outcomes
from sglang_april.recovery.model_identity import ModelIdentity, vocabulary_digest
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.recorder import Recorder
from sglang_april.scheduler.restore import restored_event, starting_version
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.version_clock import UNNAMED

log = logging.getLogger("sglang_april")


def restart(s: Scheduler, controller: Controller, config: AprilConfig, disk: DiskTier | None) -> None:
    """Restore the journal's state into a controller; rank 0 continues the journal.

    Raises:
        SystemExit: journal or directory cannot be used, model or `--april-version` contradict the journal, or a sample
            does not fit into context or pool.
    """
    try:
        if config.journal is None:
            _start_at(controller, config.version or 0, unnamed=False)
            if disk is not None:
                disk.begin("")
            return
        journal = Journal(config.journal, config.journal_sync) if shape.tp_rank(s) == 0 else None
        if journal is not None:
            journal.claim(_identity(s))
        saved = _on_all_ranks(s, journal.load() if journal is not None else None)
        _check_params(saved)
        _check_lengths(s, saved)
        version, unnamed = starting_version(config.version, saved.version, damaged=saved.version_damaged)
        _start_at(controller, version, unnamed=unnamed)
        _take_over(s, controller, saved, disk)
    except (JournalError, DiskError, ValueError) as error:
        raise SystemExit(f"sglang-april: {error}") from error
    if journal is not None:
        controller.context.engine.send(restored_event(saved, unnamed=unnamed))
        engine = controller.context.engine
        recorder = controller.context.recorder = Recorder(engine, journal, config.journal_interval, saved.attached)
        if not (unnamed and saved.version_damaged):  # the next start must not take a guess for the record
            recorder.version(version)
        recorder.epoch(saved.next_epoch)
        recorder.commit()
        _log(config, saved, version)


def _check_params(saved: JournalSnapshot) -> None:
    """Another SGLang release may have written the journal.

    Raises:
        JournalError: the installed one cannot continue a group.
    """
    for params, group in {group.params: group for group in saved.groups if not group.whole}.items():
        try:
            decode_params(params)
        except ValueError as error:
            raise JournalError(f"the journal's group {group.prompt.id!r} cannot be continued: {error}") from error


def _check_lengths(s: Scheduler, saved: JournalSnapshot) -> None:
    """The server may have been started with a smaller context or pool.

    SGLang has no room for a sample that exceeds the context, and lets one that exceeds the pool block its queue. An
    attached request that does begins anew when it is sent again, and SGLang answers it.

    Raises:
        JournalError: an unfinished sample does not fit.
    """
    for group in saved.groups:
        if reason := _why_too_long(s, group):
            raise JournalError(f"the journal's prompt {group.prompt.id!r} of run {group.run!r} {reason}")
    too_long = [group.gid for group in saved.attached if _why_too_long(s, group)]
    if too_long:
        log.warning("april: %d unfinished attached requests are too long for this server: forgotten", len(too_long))
        saved.attached = [group for group in saved.attached if group.gid not in set(too_long)]


def _why_too_long(s: Scheduler, group: SnapshotGroup) -> str:
    """Why SGLang cannot draw another token of a group's longest unfinished sample, or an empty string.

    By the limits of `Scheduler.init_req_max_new_tokens` and `TpModelWorker.get_worker_info`.
    """
    drawn = [x.chunk.length if x.chunk is not None else 0 for x in group.samples if x.finished is None]
    if not drawn:
        return ""
    prompt, output, page = len(group.prompt.input_ids) // 4, max(drawn), s.page_size
    least = prompt + max(output + 3, 7)
    least_pool = max(least, -(-prompt // page) * page + page + output + 2)
    context, pool = s.model_config.context_len, s.max_total_num_tokens
    have = f"has {prompt} tokens, and {output} more have been drawn"
    if least > context:
        return f"{have}: this needs a --context-length of {least} or more, and the server has {context}"
    if least_pool > pool:
        flags = "raise --max-total-tokens or --mem-fraction-static"
        return f"{have}: this needs a KV pool of {least_pool} tokens or more, and the server has {pool}; {flags}"
    return ""


def _identity(s: Scheduler) -> ModelIdentity:
    config, tokenizer = s.model_config, getattr(s, "tokenizer", None)
    properties = {
        "architecture": "/".join(config.hf_config.architectures or ()),
        "number of layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "number of attention heads": config.num_attention_heads,
        "number of KV heads": config.num_key_value_heads,
        "dtype": str(config.dtype).removeprefix("torch."),
        "vocabulary size": config.vocab_size,
    }
    if tokenizer is not None:  # with --skip-tokenizer-init there is none
        properties["tokenizer"] = vocabulary_digest(tokenizer.get_vocab())
    return ModelIdentity(
        shape.resolved(s.server_args).model_path, {name: str(value) for name, value in properties.items()}
    )


def _take_over(s: Scheduler, controller: Controller, saved: JournalSnapshot, disk: DiskTier | None) -> None:
    if disk is None:
        controller.restore(saved)
        return
    search, began = KvSearch(disk, saved.epoch), time.monotonic()
    controller.restore(saved, lambda wanted: _search_on_all_ranks(s, search, wanted))
    back = [x for run in controller.context.ledger.runs.values() for x in run.suspended if x.kv.pages is not None]
    removed = disk.begin(saved.next_epoch, map(key_of, back))
    log.info(
        "april: recovered the KV of %d partials from the disk: %d bytes verified in %.1f s, %d other files removed",
        len(back),
        search.bytes_read,
        time.monotonic() - began,
        removed,
    )


def _search_on_all_ranks(s: Scheduler, search: KvSearch, wanted: Sequence[tuple[Sample, StoredKv]]) -> list[Outcome]:
    """Search on all ranks. Samples with a grammar are prefilled again: their requests wait for its compilation."""
    wanted_files = [(key_of(sample), kv) for sample, kv in wanted if not has_grammar(sample.group)]
    outcomes_by_rank: list[Any] = [None] * shape.tp_size(s)
    torch.distributed.all_gather_object(outcomes_by_rank, search.find_all(wanted_files), group=s.tp_cpu_group)
    outcomes = iter(combine_outcomes(outcomes_by_rank))
    return [None if has_grammar(sample.group) else next(outcomes) for sample, _ in wanted]


def _start_at(controller: Controller, version: int, *, unnamed: bool) -> None:
    c = controller.context
    c.clock.version, c.clock.unnamed = version, unnamed
    # Until the version is named, KV in the tree may belong to any weights, even to those of the version named later.
    # Its cache keys must therefore differ from those of every version.
    c.engine.version = UNNAMED if unnamed else version


def _on_all_ranks(s: Scheduler, saved: JournalSnapshot | None) -> JournalSnapshot:
    """Rank 0's copy, on every rank: part of the start, not of a scheduling step."""
    if shape.tp_size(s) == 1:
        assert saved is not None
        return saved
    box: list[Any] = [msgspec.msgpack.encode(saved) if saved is not None else None]
    torch.distributed.broadcast_object_list(box, src=s.tp_group.first_rank, group=s.tp_cpu_group)
    return msgspec.msgpack.decode(box[0], type=JournalSnapshot)


def _log(config: AprilConfig, saved: JournalSnapshot, version: int) -> None:
    samples = [x for g in saved.groups for x in g.samples]
    log.info(
        "april: journal %s (%s): version %d, %d undelivered samples (%d finished, %d with tokens), %d open rounds, "
        "%d kept replies, %d damaged records",
        config.journal,
        config.journal_sync,
        version,
        len(samples),
        sum(x.finished is not None for x in samples),
        sum(x.chunk is not None for x in samples),
        len(saved.rounds),
        len(saved.replies),
        saved.corrupt,
    )
