"""Tells of workers that served and are lost, and of those that came back, once for each incarnation.

A worker is lost when its registration has run out; whether its process is gone is looked up where it ran on this host.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable

import psutil

from tandem.registry import WorkerRecord
from tandem.types import Epoch, WorkerId


class Losses:
    """Event loop only. `note` is told."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._last: dict[WorkerId, WorkerRecord] = {}
        """Of those that left, too."""
        self._present: frozenset[WorkerId] = frozenset()
        self._told: dict[WorkerId, Epoch] = {}

    def registered(self, records: Collection[WorkerRecord]) -> None:
        """Who is registered now. An incarnation whose end did not show before its successor is told of with that."""
        for record in records:
            worker_id, known = record.worker_id, self._last.get(record.worker_id)
            if self._told.pop(worker_id, None) == record.epoch:
                self._note(f"worker {worker_id} (process {record.pid}) is back")
            elif worker_id in self._present and known is not None and known.epoch < record.epoch:
                self._note(f"worker {worker_id} died (process {known.pid}) and is back (process {record.pid})")
            self._last[worker_id] = record
        self._present = frozenset(record.worker_id for record in records)

    def missed(self, worker_ids: Iterable[WorkerId]) -> None:
        """Who was ready and is not registered any more, though nobody takes it away."""
        for worker_id in worker_ids:
            record = self._last.get(worker_id)
            if record is not None and self._told.get(worker_id) != record.epoch:
                self._told[worker_id] = record.epoch
                self._note(_loss(record))


def _loss(record: WorkerRecord) -> str:
    if record.node not in ("", socket.gethostname()):
        return f"worker {record.worker_id} on {record.node} (process {record.pid}) is lost, starting it again"
    if psutil.pid_exists(record.pid):
        return f"worker {record.worker_id} (process {record.pid}) gives no sign of life; waiting for it"
    return f"worker {record.worker_id} died (process {record.pid}), starting it again"
