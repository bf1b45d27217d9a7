"""Sealed anonymous memory that two processes can share: made and sent by one side, mapped read-only by the other.

A memfd has no name, so a killed process leaves nothing behind. It is sealed against shrinking, so a peer that maps it
cannot be made to fault.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
from bisect import bisect_right

import numpy as np
import torch

from kv_transfer.segments import Bytes
from tandem.errors import TransportError

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4
_SEALS = _F_SEAL_SHRINK | _F_SEAL_GROW


class Slab:
    """Memory that a peer can be given. `close` closes the descriptor; the pages live as long as views."""

    def __init__(self, slab_id: int, fd: int, view: Bytes) -> None:
        """Takes over `fd`, all of whose memory `view` is."""
        self.slab_id = slab_id
        self.num_bytes = view.nbytes
        self.fd = fd
        self.view = view
        self.start = int(view.ctypes.data)

    @classmethod
    def make(cls, slab_id: int, num_bytes: int) -> Slab:
        """New memory, zeroed. Raises OSError when there is none."""
        fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            return cls(slab_id, fd, np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8))
        except OSError:
            os.close(fd)
            raise

    def tensor(self) -> torch.Tensor:
        """All of it as a 1-D uint8 tensor."""
        return torch.from_numpy(self.view)

    def close(self) -> None:
        """Closes the descriptor. Pages stay mapped until the last view of them is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self.view


class SlabTable:
    """Finds the slab that holds a piece of memory, by address. Thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._slabs: list[Slab] = []
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> Slab:
        """A new slab that `find` knows. Raises OSError when memory runs out."""
        slab = self.transient(num_bytes)
        self._insert(slab)
        return slab

    def lend(self, fd: int, view: Bytes) -> None:
        """Makes memory of somebody else's known, all of a sealed memfd; `fd` stays theirs. Raises OSError."""
        self._insert(Slab(next(self._ids), os.dup(fd), view))

    def _insert(self, slab: Slab) -> None:
        with self._lock:
            index = bisect_right(self._starts, slab.start)
            self._starts.insert(index, slab.start)
            self._slabs.insert(index, slab)

    def transient(self, num_bytes: int) -> Slab:
        """A new slab for one message, which `find` does not know."""
        return Slab.make(next(self._ids), num_bytes)

    def find(self, view: Bytes) -> tuple[Slab, int] | None:
        """The slab that holds all of `view`, and the offset in it."""
        address = int(view.ctypes.data)
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            slab, offset = self._slabs[index], address - self._starts[index]
        return (slab, offset) if offset + view.nbytes <= slab.num_bytes else None

    def close(self) -> None:
        """Closes all slabs of `add`."""
        with self._lock:
            for slab in self._slabs:
                slab.close()
            self._slabs.clear()
            self._starts.clear()


def map_peer(fd: int) -> Bytes:
    """A peer's slab, read-only; takes over `fd`. Raises TransportError when it is not sealed memory."""
    try:
        if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
            raise TransportError("a peer's memory is not sealed against resizing")
        return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ), dtype=np.uint8)
    except (OSError, ValueError) as exc:
        raise TransportError(f"a peer's memory cannot be mapped: {exc}") from exc
    finally:
        os.close(fd)
