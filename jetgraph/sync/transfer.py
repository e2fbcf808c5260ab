"""Folders that updates travel in, each of which lives as long as its owner.

The owner holds a lock (flock) on its folder.  The kernel drops the lock with the process, however that dies, so a
folder that somebody else can lock has no owner, and whoever starts next removes what a killed run left in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "jetgraph-sync-"


@contextlib.contextmanager
def transfer_folder(num_bytes: int) -> Iterator[Path]:
    """A new folder for an update of at most ``num_bytes``: in shared memory, or, where that is too small, on disk.

    Removed at the end of the context.  Folders of dead owners are removed before the room is counted.
    """
    remove_orphans()
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * num_bytes
    folder, lock = _new_folder(SHARED_MEMORY if in_memory else Path(tempfile.gettempdir()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_orphans() -> list[Path]:
    """Remove this user's transfer folders whose owner is dead; returns them.  One in use is never touched."""
    found = [path for root in (SHARED_MEMORY, Path(tempfile.gettempdir())) for path in root.glob(f"{PREFIX}*")]
    return [path for path in found if _removed(path)]


def _new_folder(root: Path) -> tuple[Path, int]:
    """A folder and the file descriptor whose lock says that it is in use."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: nobody else can lock it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)  # somebody who starts at this moment took it for an orphan before it was locked


def _removed(folder: Path) -> bool:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False  # gone already, somebody else's, or no folder
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
        return True
    except OSError:
        return False  # in use
    finally:
        os.close(lock)
