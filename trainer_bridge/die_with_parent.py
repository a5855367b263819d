"""`python -m trainer_bridge.die_with_parent PARENT COMMAND…` executes COMMAND, which is killed when PARENT dies."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl option of Linux: the signal to send when the parent dies. It is preserved across `exec`."""


def main(argv: list[str]) -> None:
    """Replace this process by the command; does not return."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(argv[0]):
        sys.exit("the parent has died")
    os.execvp(argv[1], argv[1:])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
