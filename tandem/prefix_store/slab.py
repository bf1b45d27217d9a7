"""The host tier's memory: anonymous, sealed, shared with the node's workers; slots of one block, and their generations.

A memfd has no name, so a killed store leaves nothing behind, and workers that map it read on undisturbed. Before the
slots lies one number for each of them, its generation, which changes whenever the slot is given to another block:
equal before and after a copy means that the copy is of one block.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tandem.errors import StoreError
from tandem.kv.payload_digest import PayloadHasher

Bytes: TypeAlias = npt.NDArray[np.uint8]

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = 0x2 | 0x4  # neither shrinks nor grows: who maps it cannot be made to fault
_PAGE = 4096


def block_digest(block: torch.Tensor | Bytes) -> int:
    """Of a block's bytes, never 0; the same as that of a message which carries it. The GIL is free."""
    view = block.numpy() if isinstance(block, torch.Tensor) else block
    hasher = PayloadHasher(view.nbytes)
    hasher.update(view.data)
    return hasher.digest()


def _table_bytes(num_slots: int) -> int:
    return -(-8 * num_slots // _PAGE) * _PAGE


def slab_bytes(num_slots: int, block_bytes: int) -> int:
    """Bytes of a slab with its table of generations."""
    return _table_bytes(num_slots) + num_slots * block_bytes


class SlabView:
    """A mapped slab. Slots are `block_bytes` long, one after another; their pages live as long as any view of them."""

    def __init__(self, fd: int, *, num_slots: int, block_bytes: int) -> None:
        """Maps `fd`, which stays the caller's. Raises StoreError when it is not a sealed slab of that size."""
        size = slab_bytes(num_slots, block_bytes)
        try:
            if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                raise StoreError("what the store shares is not a sealed slab of the agreed size")
            memory = mmap.mmap(fd, size)
        except (OSError, ValueError) as exc:
            raise StoreError(f"{size} bytes of the store's memory cannot be mapped: {exc}") from exc
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.everything: Bytes = np.frombuffer(memory, dtype=np.uint8)
        start = _table_bytes(num_slots)
        self.generations: npt.NDArray[np.uint64] = self.everything[: 8 * num_slots].view(np.uint64)
        self._blocks: Bytes = self.everything[start:].reshape(num_slots, block_bytes)
        self.memory = torch.from_numpy(self._blocks)

    def bytes_of(self, slot: int) -> Bytes:
        """One slot as a writable numpy view."""
        block: Bytes = self._blocks[slot]
        return block

    def tensor_of(self, slot: int) -> torch.Tensor:
        """One slot as a 1-D uint8 tensor over the same bytes."""
        return self.memory[slot]

    def generations_of(self, slots: Iterable[int]) -> tuple[int, ...]:
        """As they are now."""
        return tuple(int(self.generations[slot]) for slot in slots)


class Slab(SlabView):
    """The store's own: makes the memory. `close` closes the descriptor; the pages go with the last view."""

    def __init__(self, *, num_slots: int, block_bytes: int) -> None:
        """Raises StoreError when there is no memory for it."""
        try:
            self.fd = os.memfd_create("tandem-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as exc:
            raise StoreError(f"shared memory cannot be had: {exc}") from exc
        try:
            os.ftruncate(self.fd, slab_bytes(num_slots, block_bytes))
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
            super().__init__(self.fd, num_slots=num_slots, block_bytes=block_bytes)
        except (OSError, StoreError) as exc:
            os.close(self.fd)
            raise StoreError(f"{num_slots} slots of {block_bytes} bytes cannot be had: {exc}") from exc

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
