"""A process group of two for one link, by itself: no global world, nothing that other links share or wait for.

Gloo moves host memory, NCCL memory of GPUs. Both sides meet in a store of the link's own; when either goes, only this
group is lost. The calls block: each group belongs to one thread on each side.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroupGloo

from kv_transfer.meeting import Meeting
from tandem.errors import TransportError

Backend = Literal["gloo", "nccl"]
_dist: Any = dist
STALL_S = 3.0
"""A transfer that takes this long, and a second more for every 10 MB, breaks its group: torch.distributed can take none
back otherwise."""
_SLOWEST_BYTES_PER_S = 10e6
OPEN_TIMEOUT_S = 5.0
SOURCE_RANK, DESTINATION_RANK = 0, 1


class Group(Protocol):
    """One side of a link. Both methods return when `tensor` may be used again; raise TransportError when it broke."""

    def send(self, tensor: torch.Tensor) -> None:
        """Source: sends the bytes; the destination must be receiving as many."""

    def receive(self, tensor: torch.Tensor) -> None:
        """Destination: fills the tensor with what the source sends next."""


class GlooGroup:
    """Over TCP, between the addresses of the hosts."""

    _kind: Any = ProcessGroupGloo
    """Typed loosely: its stubs leave out half of it."""

    def __init__(self, store: Any, rank: int, device: Any) -> None:
        options = self._kind._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=OPEN_TIMEOUT_S)
        options._threads = 1
        try:
            self._group: Any = _within(OPEN_TIMEOUT_S, lambda: self._kind(store, rank, 2, options))
        except TimeoutError as exc:
            raise TransportError("the process group could not be made: the peer does not come") from exc
        except RuntimeError as exc:
            raise TransportError(f"the process group could not be made: {first_line(exc)}") from exc

    def send(self, tensor: torch.Tensor) -> None:
        """See `Group`."""
        _wait(lambda: self._group.send([tensor], DESTINATION_RANK, 0), tensor)

    def receive(self, tensor: torch.Tensor) -> None:
        """See `Group`."""
        _wait(lambda: self._group.recv([tensor], SOURCE_RANK, 0), tensor)


class NcclGroup:
    """Between two GPUs, never the same one. NCCL's calls are queued on the thread's stream, which is waited for."""

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        from torch.distributed import ProcessGroupNCCL

        self._device = device
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=STALL_S)
        try:
            self._group: Any = ProcessGroupNCCL(store, rank, 2, options)
        except RuntimeError as exc:
            raise TransportError(f"the process group could not be made: {first_line(exc)}") from exc

    def send(self, tensor: torch.Tensor) -> None:
        """See `Group`."""
        with torch.cuda.device(self._device):
            _wait(lambda: self._group.send([tensor], DESTINATION_RANK, 0), tensor)
            torch.cuda.current_stream().synchronize()

    def receive(self, tensor: torch.Tensor) -> None:
        """See `Group`."""
        with torch.cuda.device(self._device):
            _wait(lambda: self._group.recv([tensor], SOURCE_RANK, 0), tensor)
            torch.cuda.current_stream().synchronize()


def _within(timeout_s: float, make: Callable[[], Any]) -> Any:
    """Makes something on a thread of its own, which ends later by itself when TimeoutError was raised.

    Gloo tries six times, each as long as its options say.
    """
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as exc:
            made.set_exception(exc)

    threading.Thread(target=run, name="collective-meet", daemon=True).start()
    return made.result(timeout_s)


def _wait(start: Any, tensor: torch.Tensor) -> None:
    try:
        start().wait(timedelta(seconds=STALL_S + tensor.numel() / _SLOWEST_BYTES_PER_S))
    except RuntimeError as exc:
        raise TransportError(f"the process group broke: {first_line(exc)}") from exc


def first_line(exc: RuntimeError) -> str:
    """torch's errors go on with frames of C++."""
    return str(exc).partition("\n")[0]


class Groups:
    """Makes groups for one transport, which share one listening device. `host` is the address to be reached at.

    `device` is where the memory lies that they move. Raises TransportError for a GPU where torch has no NCCL.
    """

    def __init__(self, device: torch.device, *, host: str) -> None:
        self.device = device
        self.backend: Backend = "gloo" if device.type == "cpu" else "nccl"
        if self.backend == "nccl":
            if not dist.is_nccl_available():
                raise TransportError(f"the collective transport moves memory of {device} over NCCL, which torch lacks")
        else:
            self._gloo_device: Any = ProcessGroupGloo.create_device(hostname=host, lazy_init=False)

    def open(self, sock: socket.socket, store: Any, name: str, rank: int) -> Group:
        """Meets the other side over `sock`, NCCL's in `store` under `name`; returns when both have the group.

        Blocks, as long as the socket's timeout lets it. Raises TransportError when the other side does not come.
        """
        meeting = Meeting(sock)
        if self.backend == "nccl":
            group: Group = NcclGroup(_dist.PrefixStore(name, store), rank, self.device)
        else:
            group = GlooGroup(meeting, rank, self._gloo_device)
        meeting.end()
        return group

    def close(self) -> None:
        """Ends the device, once every group is gone."""
        self._gloo_device = None


def open_store(host: str, port: int, *, is_master: bool) -> Any:
    """The place where the two sides of NCCL's groups meet; port 0 takes a free one. Raises TransportError."""
    try:
        return _dist.TCPStore(
            host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=OPEN_TIMEOUT_S)
        )
    except RuntimeError as exc:
        raise TransportError(f"the store at {host}:{port} cannot be opened: {first_line(exc)}") from exc
