"""Which containers still have processes, wherever those have gone."""

from __future__ import annotations

import psutil

from tests.kube.container import MARK


def marks_of_processes() -> set[str]:
    """The mark of every container with a process: pod uid, container and the number of its start."""
    found = set()
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if mark is not None:
            found.add(mark)
    return found
