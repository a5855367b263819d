"""Durability of directory entries over a loss of power."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the entries of a directory (new names, renames, removals) durable, but not the content of its files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
