"""`april-train`, `python -m trainer_bridge`: train, check a configuration, or draw a report of a run."""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from trainer_bridge.args import load, parser
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.validate import RunError, dry_run


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if all went well, 1 for a run that was cut off, 2 for a configuration that cannot be run."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["report"]:
        return _report(argv[1:])
    flags = vars(parser().parse_args(argv))
    path, only_check = flags.pop("config", None), flags.pop("dry_run", False)
    try:
        config = load(path, flags)
        print(config.as_yaml(), end="", flush=True)  # noqa: T201 - the command's output
        lines = dry_run(config)
    except ConfigError as error:
        print(f"april-train: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if only_check:
        print("\n".join(["", *lines]))  # noqa: T201
        return 0
    return _train(config)


def _train(config: Config) -> int:
    from sglang_april.client import AprilError
    from trainer_bridge.handshake import HandshakeError
    from trainer_bridge.loop import TrainingLoop
    from trainer_bridge.megatron.shapes import UnsupportedModelError
    from trainer_bridge.megatron.workers import TrainerFailed
    from trainer_bridge.server_process import EngineGoneError

    # A terminated run still ends its server and its reward processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        loop = TrainingLoop(config)
    except (ConfigError, UnsupportedModelError, OSError) as error:
        print(f"april-train: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        loop.run()
    except ConfigError as error:  # of a row of the data, which is read when it is its turn
        print(f"april-train: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except (RunError, EngineGoneError, HandshakeError, TrainerFailed, AprilError, OSError) as error:
        saved = loop.store.steps()
        print(  # noqa: T201
            f"april-train: {error}. The same command goes on after step {saved[-1] if saved else 0}.", file=sys.stderr
        )
        return 1
    finally:
        loop.close()
    return 0


def _report(argv: list[str]) -> int:
    from trainer_bridge.report import write_report

    made = argparse.ArgumentParser(prog="april-train report", description="An HTML page with plots of a run.")
    made.add_argument("run_dir", type=Path, help="the run's folder: `save` of its configuration")
    made.add_argument("--out", type=Path, help="the page; RUN_DIR/report.html if not given")
    args: Any = made.parse_args(argv)
    try:
        page = write_report(args.run_dir, args.out or args.run_dir / "report.html")
    except FileNotFoundError as error:
        print(f"april-train report: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(page)  # noqa: T201
    return 0
