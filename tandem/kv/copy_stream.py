"""Copies of blocks between a device's cache and the host, beside what the device computes.

On a GPU they are queued on one stream of their own and go through pinned memory; events order them behind what the
engine had queued where they touch the same blocks. Orders are tested; none of it has been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tandem.kv.pinned import PinnedArena, pinned


class CopyChannel(Protocol):
    """One thread's way; several may share a stream."""

    @contextmanager
    def copying(self, *, after_compute: bool) -> Iterator[None]:
        """What is copied within is done when it ends; it begins after what the engine has queued, if it must."""
        yield

    def up(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device."""

    def down(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host, all of it there; until the next call."""


class HostChannel:
    """The cache lies on the host."""

    @contextmanager
    def copying(self, *, after_compute: bool) -> Iterator[None]:
        """Nothing is queued anywhere."""
        yield

    def up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def down(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class CudaChannel:
    """The engine computes on the default stream of `device`, copies are queued on `stream`."""

    def __init__(
        self,
        device: torch.device,
        stream: Any,
        *,
        allocate: Callable[[int], torch.Tensor] = pinned,
        cuda: Any = torch.cuda,
    ) -> None:
        self._device = device
        self._stream = stream
        self._cuda = cuda
        self._uploads, self._downloads = PinnedArena(allocate), PinnedArena(allocate)

    @contextmanager
    def copying(self, *, after_compute: bool) -> Iterator[None]:
        """See `CopyChannel.copying`."""
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            if after_compute:
                computed = self._cuda.Event()
                computed.record(self._cuda.default_stream(self._device))
                self._stream.wait_event(computed)
            yield
            self._stream.synchronize()
        self._uploads.reset()

    def up(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `CopyChannel.up`."""
        return self._uploads.like(tensor).copy_(tensor).to(self._device, non_blocking=True)

    def down(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `CopyChannel.down`."""
        self._downloads.reset()
        found = self._downloads.like(tensor).copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return found


def channels(device: torch.device, count: int) -> list[CopyChannel]:
    """One for each of `count` threads, on one stream."""
    if device.type == "cpu":
        return [HostChannel() for _ in range(count)]
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    return [CudaChannel(device, stream) for _ in range(count)]
