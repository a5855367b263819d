"""What a file system promises to keep over a loss of power."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Its entries (new names, renames, removals) are durable when this returns; what its files hold need not be."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
