"""Handlers of the start: flags, refusals, and the report of verified hooks from each process."""

import argparse
import functools
import logging
import os
from typing import Any

from sglang_april import config
from sglang_april.adapter import hooking
from sglang_april.adapter.core import refusals
from sglang_april.adapter.refusals import stop_if
from sglang_april.recovery.journal import JournalError, probe

log = logging.getLogger("sglang_april")


def add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ServerArgs.add_cli_args: add the --april-* flags to SGLang's parser and help."""
    config.add_arguments(parser)


def publish_flags(_: type, args: argparse.Namespace) -> None:
    """BEFORE ServerArgs.from_cli_args: publish the flags as SGLang's parser read them."""
    typed = {flag.field: getattr(args, f"april_{flag.field}", None) for flag in config.FLAGS}
    given = {field: value for field, value in typed.items() if value is not None}
    try:
        config.publish(config.from_env(os.environ) | given)
    except config.ConfigError as error:
        raise SystemExit(f"sglang-april: {error}") from error


def refuse_requested(server_args: Any) -> None:
    """BEFORE ServerArgs.__post_init__: check the arguments as the user gave them."""
    if not _other_model(server_args):
        stop_if(refusals.find(server_args))


def refuse_resolved(server_args: Any) -> None:
    """BEFORE ServerArgs.check_server_args, at the start of the server: check the resolved arguments and the model."""
    if _other_model(server_args):
        log.warning("sglang-april: this server is plain SGLang: --april-model is not %s", server_args.model_path)
        hooking.disable()
        return
    stop_if(refusals.find(server_args) or refusals.find_in_model(server_args) or refusals.find_pace(server_args))
    if not server_args.node_rank:  # the journal is on the first machine
        _probe_journal()


def _other_model(server_args: Any) -> bool:
    model = config.load().model
    return model is not None and len({os.path.realpath(path) for path in (model, server_args.model_path)}) > 1


@functools.cache
def _probe_journal() -> None:
    """Once per process: later the scheduler has the journal open."""
    settings = config.load()
    try:
        if settings.journal is not None:
            probe(settings.journal)
    except JournalError as error:
        raise SystemExit(f"sglang-april: {error}") from error


def report_hooks(info: dict[str, Any], _: Any) -> dict[str, Any]:
    """AFTER Scheduler.get_init_info: add the verified hooks of this scheduler."""
    return {**info, "april": hooking.hook_report()}


def require_reports(infos: list[dict[str, Any]], *_: Any, **__: Any) -> None:
    """AFTER _wait_for_scheduler_ready: every scheduler must run with the same hooks as this process.

    Raises:
        SystemExit: a scheduler does not; all child processes are stopped.
    """
    expected = hooking.hook_report()
    for rank, info in enumerate(infos):
        report = info.get("april") or {}
        if report.get("hooks") != expected["hooks"]:
            _stop_children()
            raise SystemExit(f"sglang-april: the scheduler of rank {rank} runs without the hooks of the plugin.")


def _stop_children() -> None:
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
