"""The command `april-train` (`python -m trainer_bridge`): train, check a configuration, or write a report of a run."""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from trainer_bridge.args import config_parser, load
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.dry_run import dry_run
from trainer_bridge.validate import RunError, check


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit status 0: success, 1: the run failed and can be resumed, 2: invalid input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["report"]:
        return _report(argv[1:])
    flags = vars(config_parser().parse_args(argv))
    path, dry_run_only = flags.pop("config", None), flags.pop("dry_run", False)
    try:
        config = load(path, flags)
        print(config.as_yaml(), end="", flush=True)  # noqa: T201 - the command's output
        check(config)
        if dry_run_only:
            print("\n".join(["", *dry_run(config)]))  # noqa: T201
            return 0
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"april-train: {line}", file=sys.stderr)  # noqa: T201
        return 2
    return _train(config)


def _train(config: Config) -> int:
    from sglang_april.client import AprilError
    from trainer_bridge.handshake import HandshakeError
    from trainer_bridge.loop import TrainingLoop
    from trainer_bridge.megatron.shapes import UnsupportedModelError
    from trainer_bridge.megatron.workers import TrainerFailed
    from trainer_bridge.server_process import EngineGoneError

    # On SIGTERM, stop the servers and reward processes of the run before exiting.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        loop = TrainingLoop(config)
    except (ConfigError, UnsupportedModelError, OSError) as error:
        print(f"april-train: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        loop.run()
    except ConfigError as error:  # in a row of the data, which is parsed when it is needed
        print(f"april-train: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except (RunError, EngineGoneError, HandshakeError, TrainerFailed, AprilError, OSError) as error:
        saved = loop.store.steps()
        print(  # noqa: T201
            f"april-train: {error}. The same command resumes after step {saved[-1] if saved else 0}.", file=sys.stderr
        )
        return 1
    finally:
        loop.close()
    return 0


def _report(argv: list[str]) -> int:
    from trainer_bridge.report import write_report

    parser = argparse.ArgumentParser(prog="april-train report", description="An HTML page with plots of a run.")
    parser.add_argument("run_dir", type=Path, help="the run's folder (`save` in its configuration)")
    parser.add_argument("--out", type=Path, help="output file; default: RUN_DIR/report.html")
    args: Any = parser.parse_args(argv)
    try:
        page = write_report(args.run_dir, args.out or args.run_dir / "report.html")
    except FileNotFoundError as error:
        print(f"april-train report: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(page)  # noqa: T201
    return 0
