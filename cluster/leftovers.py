"""Temporary directories of clusters that were killed before they could take theirs away."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from cluster.ray_node import ray_parent

_OURS = re.compile(r"tandem-(?:ray|run|redis)-(\d+)-\w+")
_CONNECT_S = 0.2


def temp_parents() -> set[Path]:
    """Where the launcher's directories lie."""
    return {Path(tempfile.gettempdir()), ray_parent()}


def remove_leftovers(parents: Iterable[Path]) -> list[Path]:
    """Takes away this user's directories there (see `processes.make_temp_dir`) whose process is gone. Returns them."""
    removed = []
    for directory in sorted(path for parent in parents for path in _dead(parent)):
        if not any(map(_is_served, directory.rglob("*"))):
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    return removed


def _dead(parent: Path) -> Iterator[Path]:
    for path in parent.glob("tandem-*"):
        match = _OURS.fullmatch(path.name)
        if match is None or psutil.pid_exists(int(match[1])) or path.is_symlink() or not path.is_dir():
            continue
        if path.stat().st_uid == os.getuid():
            yield path


def _is_served(path: Path) -> bool:
    """Whether somebody answers at a socket: its process may have an id that is not known here, as in a container."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CONNECT_S)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
