"""Endpoints of the UCX transport: those that links use, and those that wait for their next link."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass

from kv_transfer.progress import ProgressThread
from kv_transfer.ucx_native import Endpoint, Worker

MAX_SPARE = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Spare:
    address: bytes
    endpoint: Endpoint
    pidfd: int | None


class EndpointPool:
    """Opens endpoints, and keeps those that links are done with for the next links to the same workers.

    UCX does not tell the other side that an endpoint was closed: over TCP a socket stays open at both ends until one
    of the processes ends. Links that come and go between two processes so use the same endpoint again. All of it runs
    on the transport's thread.
    """

    def __init__(self, worker: Worker, thread: ProgressThread) -> None:
        self._worker = worker
        self._thread = thread
        self._spares: list[_Spare] = []

    def open(self, address: bytes, *, error_handling: bool) -> Endpoint:
        """Raises TransportError when the address is not one or cannot be reached."""
        self._prune()
        found = next((spare for spare in reversed(self._spares) if spare.address == address), None)
        if found is None:
            return self._worker.connect(address, error_handling=error_handling)
        self._take_out(found)
        return found.endpoint

    def keep(self, address: bytes, endpoint: Endpoint, pidfd: int | None) -> None:
        """Takes over an endpoint that has no request under way, and its process's descriptor, if there is one."""
        spare = _Spare(address=address, endpoint=endpoint, pidfd=pidfd)
        self._spares.append(spare)
        if pidfd is not None:
            self._thread.register(pidfd, select.EPOLLIN, lambda _: self._close(spare))
        self._prune()

    def close(self) -> None:
        """Closes those that are kept."""
        for spare in list(self._spares):
            self._close(spare)

    def _prune(self) -> None:
        """Those that UCX has found broken go, and the oldest of too many."""
        for spare in [spare for spare in self._spares if not spare.endpoint.alive] + self._spares[:-MAX_SPARE]:
            if spare in self._spares:
                self._close(spare)

    def _close(self, spare: _Spare) -> None:
        self._take_out(spare)
        spare.endpoint.close()

    def _take_out(self, spare: _Spare) -> None:
        self._spares.remove(spare)
        if spare.pidfd is not None:
            self._thread.unregister(spare.pidfd)
            os.close(spare.pidfd)
