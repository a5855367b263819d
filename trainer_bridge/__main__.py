"""Entry point of `april-train` and `python -m trainer_bridge`; the command itself is in `cli.py`.

There are no imports at the top, because reward processes import this module again and must not import torch.
"""

import os
import signal
import sys


def main() -> int:
    """Run the command; returns its exit status."""
    try:
        from trainer_bridge.cli import main as run

        status = run()
    except KeyboardInterrupt:  # before the run has installed its handlers
        status = 128 + signal.SIGINT
    if status > 128:  # threads may wait for servers that are not this run's
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
