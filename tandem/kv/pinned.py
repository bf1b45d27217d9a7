"""Host memory that a GPU reads and writes by itself, handed out in pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch

_CHUNK_BYTES = 1 << 20
_ALIGNMENT = 64


def pinned(num_bytes: int) -> torch.Tensor:
    """Uninitialised, 1-D uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedArena:
    """Hands out pieces one after another; all of them come back at once. One thread at a time."""

    def __init__(self, allocate: Callable[[int], torch.Tensor] = pinned) -> None:
        self._allocate = allocate
        self._chunks: list[torch.Tensor] = []
        self._index = 0
        self._used = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised piece of the shape and type of `tensor`, contiguous."""
        num_bytes = tensor.numel() * tensor.element_size()
        return self._take(num_bytes).view(tensor.dtype).view(tensor.shape)

    def reset(self) -> None:
        """Nothing that was handed out is used any more."""
        self._index = self._used = 0

    def _take(self, num_bytes: int) -> torch.Tensor:
        while self._index < len(self._chunks):
            start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            if start + num_bytes <= self._chunks[self._index].numel():
                self._used = start + num_bytes
                return self._chunks[self._index][start : start + num_bytes]
            self._index, self._used = self._index + 1, 0
        self._chunks.append(self._allocate(max(num_bytes, _CHUNK_BYTES)))
        self._used = num_bytes
        return self._chunks[-1][:num_bytes]
