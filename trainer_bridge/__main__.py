"""Entry point of `april-train` and `python -m trainer_bridge`; the command itself is in `cli.py`.

There are no imports at the top, because reward processes import this module again and must not import torch.
"""

import sys


def main() -> int:
    """Run the command; returns its exit status."""
    from trainer_bridge.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
