"""One owner for each directory: a lock that the operating system takes back when the owner dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tandem.errors import DirectoryInUse


class DirectoryLock:
    """Holds `LOCK` in a directory, with this process's id in it."""

    def __init__(self, directory: Path) -> None:
        """Raises DirectoryInUse, naming the holder, when the directory is somebody's."""
        self._fd = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.pread(self._fd, 32, 0).decode().strip()
            os.close(self._fd)
            raise DirectoryInUse(f"{directory} is in use by process {holder or 'unknown'}") from exc
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Gives the directory free."""
        os.close(self._fd)
