"""`april-train` and `python -m trainer_bridge`: the command line is `cli.py`.

Nothing is imported at the top: the processes that compute rewards import this module again, and need no torch.
"""

import sys


def main() -> int:
    """The command line; its exit status."""
    from trainer_bridge.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
