"""Entry points of `april-train` (also `python -m trainer_bridge`) and `april-convert`; the commands are in `cli.py` and
`megatron/convert.py`.

There are no imports at the top, because reward processes import this module again and must not import torch.
"""

import os
import signal
import sys


def main() -> int:
    """Run the command; returns its exit status."""
    try:
        try:
            from trainer_bridge.cli import main as run
        except ModuleNotFoundError as missing:
            return _not_installed("april-train", missing)
        status = run()
    except KeyboardInterrupt:  # before the run has installed its handlers
        status = 128 + signal.SIGINT
    if status > 128:  # threads may wait for servers that are not this run's
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)
    return status


def convert() -> int:
    """Run `april-convert`; returns its exit status."""
    try:
        from trainer_bridge.megatron.convert import main as run
    except ModuleNotFoundError as missing:
        return _not_installed("april-convert", missing)
    return run()


def _not_installed(command: str, missing: ModuleNotFoundError) -> int:
    """The package without its extra is the client alone."""
    install = "pip install 'sglang-april[trainer]'"
    print(f"{command}: {missing.name} is not installed; {install} installs it", file=sys.stderr)  # noqa: T201
    return 2


if __name__ == "__main__":
    sys.exit(main())
