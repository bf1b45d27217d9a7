"""Addresses in 127.0.0.0/8: one for each pod and each Service, from a range that this process has for itself."""

from __future__ import annotations

import os
import socket
import threading

_FIRST_RANGE, _NUM_RANGES = 64, 128
_LOCK_PORT = 10047
_PER_OCTET = 250


class Addresses:
    """Gives out addresses of one 127.N.0.0/16. Nobody else on this machine has the same N while this one is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claim, self._octet = _claim_range()
        self._next = 1

    @property
    def api_server(self) -> str:
        """For the API server."""
        return f"127.{self._octet}.255.1"

    def take(self) -> str:
        """One that was never given out before."""
        with self._lock:
            number, self._next = self._next, self._next + 1
        high, low = divmod(number, _PER_OCTET)
        return f"127.{self._octet}.{high}.{low + 1}"

    def close(self) -> None:
        """Gives the range back."""
        self._claim.close()


def _claim_range() -> tuple[socket.socket, int]:
    for attempt in range(_NUM_RANGES):
        octet = _FIRST_RANGE + (os.getpid() + attempt) % _NUM_RANGES
        try:
            return socket.create_server((f"127.{octet}.255.254", _LOCK_PORT)), octet
        except OSError:
            continue
    raise OSError("every range of loopback addresses is taken")
