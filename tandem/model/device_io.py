"""Numbers on their way between the host, where batches are laid out and tokens chosen, and the device that computes.

On the CPU nothing is moved. To and from a GPU everything goes through pinned memory, queued on the stream that
computes: what an iteration needs in copies that nobody waits for, what comes of it in one that is waited for. This has
never been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

HOST = torch.device("cpu")
Put = Callable[[torch.Tensor], torch.Tensor]
"""`DeviceIo.put`."""

_CHUNK_BYTES = 1 << 20
_ALIGNMENT = 64


def stay(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: `put` and `get` where the host computes."""
    return tensor



class DeviceIo(Protocol):
    """One engine's; one thread at a time."""

    @property
    def device(self) -> torch.device:
        """What computes."""

    def current(self) -> AbstractContextManager[object]:
        """Makes the device the calling thread's own while an iteration is queued."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device; ordered before what is queued next. The host's copy may go at once."""

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host, all of it there. To be used up before the next `get`."""

    def finish(self) -> None:
        """Returns when the device has done all that was queued: blocks may change hands from then on."""


class HostIo:
    """The CPU computes."""

    device = HOST

    def current(self) -> AbstractContextManager[object]:
        """See `DeviceIo.current`."""
        return nullcontext()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def finish(self) -> None:
        """It is done already."""


def pinned(num_bytes: int) -> torch.Tensor:
    """Host memory that a GPU reads and writes by itself: 1-D uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class CudaIo:
    """A GPU computes, on the stream that is current where an iteration is queued."""

    def __init__(
        self, device: torch.device, *, allocate: Callable[[int], torch.Tensor] = pinned, cuda: Any = torch.cuda
    ) -> None:
        self.device = device
        self._cuda = cuda
        self._inputs = PinnedArena(allocate)
        self._outputs = PinnedArena(allocate)

    def current(self) -> AbstractContextManager[object]:
        """See `DeviceIo.current`."""
        guard: AbstractContextManager[object] = self._cuda.device(self.device)
        return guard

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `DeviceIo.put`. The arena keeps the pinned copy until `finish`."""
        staged = self._inputs.like(tensor).copy_(tensor)
        return staged.to(self.device, non_blocking=True)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `DeviceIo.get`."""
        self._outputs.reset()
        found = self._outputs.like(tensor).copy_(tensor, non_blocking=True)
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self.device))
        event.synchronize()
        return found

    def finish(self) -> None:
        """See `DeviceIo.finish`."""
        self._cuda.current_stream(self.device).synchronize()
        self._inputs.reset()


class PinnedArena:
    """Hands out pieces of pinned memory one after another; all of them come back at once."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
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


def io_for(device: torch.device) -> DeviceIo:
    """The way to and from `device`."""
    return HostIo() if device.type == "cpu" else CudaIo(device)
