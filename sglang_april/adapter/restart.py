"""Step 2 of 9 after a restart: the journal is opened, and every rank takes over what it holds (S1, S8)."""

import logging
from typing import Any

import msgspec
import torch
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.config import AprilConfig
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.recorder import Recorder
from sglang_april.scheduler.restore import starting_version
from sglang_april.store.journal import Journal, JournalError
from sglang_april.store.saved import Saved, restored_event

UNNAMED = -1
"""In cache keys, until the policy version of the weights is named."""

log = logging.getLogger("sglang_april")


def restart(s: Scheduler, controller: Controller, config: AprilConfig) -> None:
    """Give a controller what the journal holds, and rank 0's the journal itself.

    Raises:
        SystemExit: the journal cannot be used, or stands against `--april-version`; one sentence.
    """
    if config.journal is None:
        _start_at(controller, config.version or 0, unnamed=False)
        return
    try:
        journal = Journal(config.journal, config.journal_sync) if s.ps.tp_rank == 0 else None
        saved = _on_all_ranks(s, journal.load() if journal is not None else None)
        version, unnamed = starting_version(config.version, saved.version)
    except (JournalError, ValueError) as error:
        raise SystemExit(f"sglang-april: {error}") from error
    _start_at(controller, version, unnamed=unnamed)
    controller.restore(saved)
    if journal is not None:
        controller.context.engine.send(restored_event(saved, unnamed=unnamed))
        recorder = controller.context.recorder = Recorder(controller.context.engine, journal, config.replies)
        recorder.version(version)
        recorder.commit()
        _log(config, saved, version)


def _start_at(controller: Controller, version: int, *, unnamed: bool) -> None:
    c = controller.context
    c.clock.version, c.clock.unnamed = version, unnamed
    # What SGLang's own requests leave in the tree until the version is named may be of any weights, and the version
    # that is named may be this very one.
    c.engine.version = UNNAMED if unnamed else version


def _on_all_ranks(s: Scheduler, saved: Saved | None) -> Saved:
    """Rank 0's copy, on every rank: part of the start, not of a scheduling step."""
    if s.ps.tp_size == 1:
        assert saved is not None
        return saved
    box: list[Any] = [msgspec.msgpack.encode(saved) if saved is not None else None]
    torch.distributed.broadcast_object_list(box, src=s.tp_group.first_rank, group=s.tp_cpu_group)
    return msgspec.msgpack.decode(box[0], type=Saved)


def _log(config: AprilConfig, saved: Saved, version: int) -> None:
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
