"""Reusable buffers for payloads that cannot go straight from or into their memory. Not thread-safe."""

from __future__ import annotations

import numpy as np

from kv_transfer.segments import Bytes

_MIN_BYTES = 64 << 10
_KEPT_BYTES = 128 << 20


class StagingPool:
    """Hands out buffers from size classes of powers of two, and keeps up to 128 MiB of returned ones."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}
        self._free_bytes = 0

    def take(self, num_bytes: int) -> Bytes:
        """A buffer of exactly `num_bytes` bytes, contents undefined."""
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.get(size)
        if free:
            self._free_bytes -= size
            return free.pop()[:num_bytes]
        return np.empty(size, dtype=np.uint8)[:num_bytes]

    def give_back(self, buffer: Bytes) -> None:
        """Returns a buffer of `take`; the caller must not use it any more."""
        whole = buffer.base
        if isinstance(whole, np.ndarray) and self._free_bytes + whole.nbytes <= _KEPT_BYTES:
            self._free.setdefault(whole.nbytes, []).append(whole)
            self._free_bytes += whole.nbytes
