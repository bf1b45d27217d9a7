"""Reusable buffers for payloads that cannot go straight from or into their memory. Not thread-safe."""

from __future__ import annotations

import numpy as np
import torch

from kv_transfer.device_memory import Memory
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

    def take_on(self, device: torch.device, num_bytes: int) -> Memory:
        """The same on a device; torch keeps a GPU's returned buffers by itself."""
        if device.type == "cpu":
            return self.take(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self, buffer: Memory) -> None:
        """Returns a buffer of `take` or `take_on`; the caller must not use it any more."""
        if isinstance(buffer, torch.Tensor):
            return
        whole = buffer.base
        if isinstance(whole, np.ndarray) and self._free_bytes + whole.nbytes <= _KEPT_BYTES:
            self._free.setdefault(whole.nbytes, []).append(whole)
            self._free_bytes += whole.nbytes
