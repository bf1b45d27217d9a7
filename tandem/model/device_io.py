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

from tandem.kv.pinned import PinnedArena, pinned

HOST = torch.device("cpu")
Put = Callable[[torch.Tensor], torch.Tensor]
"""`DeviceIo.put`."""


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


def io_for(device: torch.device) -> DeviceIo:
    """The way to and from `device`."""
    return HostIo() if device.type == "cpu" else CudaIo(device)
