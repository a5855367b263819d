"""Entry points of `april-train` (also `python -m trainer_bridge`) and `april-convert`; the commands are in `cli.py` and
`megatron/convert.py`.

This package is not imported at the top, because reward processes import this module again and must not import torch.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def main() -> int:
    """Run the command; returns its exit status."""

    def load() -> Callable[[], int]:
        from trainer_bridge.cli import main

        return main

    return _run("april-train", load, "nothing was changed")


def convert() -> int:
    """Run `april-convert`; returns its exit status."""

    def load() -> Callable[[], int]:
        from trainer_bridge.megatron.convert import main

        return main

    return _run("april-convert", load, "the output folder is incomplete; the same command writes it again")


def _run(command: str, load: Callable[[], Callable[[], int]], kept: str) -> int:
    """The status of the function that `load` imports.

    Ctrl-C that it does not handle itself ends with status 130 and a line that names what is `kept`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's shell starts background jobs without it
    folder = str(Path.cwd())
    if folder not in sys.path and not sys.flags.safe_path:  # as with `python -m`; the path of a script lacks it
        sys.path.insert(0, folder)  # the user's `module:function` is there; worker processes get the same path
    try:
        try:
            run = load()
        except ModuleNotFoundError as missing:
            return _not_installed(command, missing)
        status = run()
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; {kept}", file=sys.stderr)  # noqa: T201
        status = 128 + signal.SIGINT
    if status > 128:  # threads may be waiting for external servers
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)
    return status


def _not_installed(command: str, missing: ModuleNotFoundError) -> int:
    """The package without its extra is the client alone."""
    install = "pip install 'sglang-april[trainer]'"
    print(f"{command}: {missing.name} is not installed; {install} installs it", file=sys.stderr)  # noqa: T201
    return 2


if __name__ == "__main__":
    sys.exit(main())
