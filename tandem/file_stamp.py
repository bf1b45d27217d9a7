"""Whether a file is still the one that was read: replaced, rewritten and swapped links all count as another one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[tuple[int, int, int] | None, ...]


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """Inode, size and time of change of each, links followed; None for one that is not there."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
