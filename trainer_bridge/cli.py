"""The command `april-train` (`python -m trainer_bridge`): train, check a configuration, or write a report of a run."""

import argparse
import contextlib
import fcntl
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_bridge import child_processes
from trainer_bridge.args import config_parser, load
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.dry_run import dry_run
from trainer_bridge.validate import RunError, check

if TYPE_CHECKING:
    from trainer_bridge.loop import TrainingLoop


def main(argv: list[str] | None = None) -> int:
    """Run the command. Exit status 0: success, 1: the run failed and can be resumed, 2: invalid input, 130: Ctrl-C."""
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
        return _fail(2, str(error))
    with contextlib.suppress(OSError):  # the training reports what is wrong with the folder
        Path(config.save).mkdir(parents=True, exist_ok=True)
    with _locked(Path(config.save)) as ours:
        return _train(config) if ours else _fail(2, f"save: {config.save} is in use by another april-train")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a run's folder; False if another process holds it. A folder that has no locks counts as ours."""
    ours = True
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context((folder / "run.lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                ours = False
        yield ours


def _train(config: Config) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    loops: list[TrainingLoop] = []
    try:
        return _run(config, loops)
    except Interrupted as interrupted:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for loop in loops:
            loop.interrupt()
        child_processes.kill(multiprocessing.active_children())
        for loop in loops:
            loop.engines.end_servers()
        store = Checkpoints(Path(config.save), config.keep_checkpoints)
        return _fail(128 + interrupted.number, f"interrupted. {_what_is_kept(store)}")


def _run(config: Config, loops: "list[TrainingLoop]") -> int:
    """Run the training; adds its loop to `loops`."""
    from sglang_april.client import AprilError
    from trainer_bridge.handshake import HandshakeError
    from trainer_bridge.loop import TrainingLoop
    from trainer_bridge.megatron.shapes import UnsupportedModelError
    from trainer_bridge.megatron.workers import TrainerFailed
    from trainer_bridge.server_process import EngineGoneError, ServerStartError

    try:
        loop = TrainingLoop(config)
    except (ConfigError, UnsupportedModelError, OSError) as error:
        return _fail(2, str(error))
    loops.append(loop)
    try:
        _run_steps(loop)
    except ConfigError as error:  # in a row of the data, which is parsed when it is needed
        return _fail(2, str(error))
    except ServerStartError as error:
        return _fail(1, f"{error}. After a correction, for example of server_flags, run the command again.")
    except (RunError, EngineGoneError, HandshakeError, TrainerFailed, AprilError, OSError) as error:
        return _fail(1, f"{str(error).removesuffix('.')}. {_what_is_kept(loop.store)}")
    finally:
        if not isinstance(sys.exception(), Interrupted):
            loop.close()
    return 0


class Interrupted(BaseException):
    """SIGINT or SIGTERM."""

    received: ClassVar["Interrupted | None"] = None

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _interrupt(number: int, _: object) -> None:
    Interrupted.received = Interrupted(number)
    raise Interrupted.received


def _run_steps(loop: "TrainingLoop") -> None:
    try:
        loop.run()
    except Exception as error:
        if Interrupted.received is not None:  # in `torch.save`, which then raises an error of its own
            raise Interrupted.received from error
        raise


def _fail(status: int, message: str) -> int:
    for line in message.splitlines():
        print(f"april-train: {line}", file=sys.stderr)  # noqa: T201
    return status


def _what_is_kept(store: Checkpoints) -> str:
    steps = store.steps()
    if not steps:
        return "No step was saved; the same command starts from the beginning."
    return f"The same command resumes after step {steps[-1]}."


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
