"""The torch.distributed transport ("collective"): a process group of its own for each link.

Workers come and go, so there is no world that all of them belong to: a serving transport has a control port, each link
meets its peer there and makes a group of two. Gloo carries host memory, NCCL memory of GPUs; NCCL has
not been run on this project's machines.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import socket
import threading
import time
from concurrent.futures import Future

import torch

from kv_transfer.collective_link import CollectiveLink
from kv_transfer.collective_source import CollectiveSource, Writers
from kv_transfer.collective_wire import TOKEN_BYTES, Address, draw_name, send_hello
from kv_transfer.group import DESTINATION_RANK, OPEN_TIMEOUT_S, SOURCE_RANK, Group, Groups, open_store
from kv_transfer.segments import HOST
from kv_transfer.transport import Sink
from tandem.errors import LinkClosed, TransportError
from tandem.types import HandoffId, WorkerId

logger = logging.getLogger(__name__)

_BACKLOG = 128
_JOIN_S = 1.0
"""A thread that waits for a peer which stands still ends by itself later, when its group breaks."""


class CollectiveTransport:
    """See `kv_transfer.transport.Transport`. `host` is the address at which peers reach this process.

    Memory of the host goes over Gloo, memory of a CUDA `device` over NCCL.
    """

    name = "collective"

    def __init__(self, *, worker_id: WorkerId, host: str = "127.0.0.1", device: torch.device = HOST) -> None:
        """Raises TransportError for a GPU without NCCL."""
        self._worker_id = worker_id
        self._host = host
        self._groups = Groups(device, host=host)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._writers = Writers()
        self._lock = threading.Lock()
        self._closed = False
        self._links: set[CollectiveLink] = set()
        self._sources: set[CollectiveSource] = set()
        self._accepting: threading.Thread | None = None
        self._listener = socket.create_server((host, 0), backlog=_BACKLOG, family=_family(host))
        self._store = open_store(host, 0, is_master=True) if self._groups.backend == "nccl" else None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Private memory, of the GPU with NCCL. Raises TransportError when there is none or after `close`."""
        with self._lock:
            self._check_open()
        try:
            if self._groups.device.type != "cpu":
                return torch.zeros(num_bytes, dtype=torch.uint8, device=self._groups.device)
            return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        except (OSError, ValueError, RuntimeError) as exc:
            raise TransportError(f"{num_bytes} bytes of memory cannot be had: {exc}") from exc

    def lend(self, fd: int, memory: torch.Tensor) -> None:
        """Nothing to do: any memory of this process is sent from as it is."""

    def address(self) -> bytes:
        """Host, both ports and the token."""
        return Address(
            backend=self._groups.backend,
            host=self._host,
            control_port=self._listener.getsockname()[1],
            store_port=0 if self._store is None else self._store.port,
            token=self._token,
        ).pack()

    def serve(self, sink: Sink) -> None:
        """Accepts sources. Raises TransportError when called twice or after `close`."""
        with self._lock:
            self._check_open()
            if self._accepting is not None:
                raise TransportError("serve was called twice")
            name = f"collective-{self._worker_id}"
            self._accepting = threading.Thread(target=self._accept_all, args=(sink,), name=name, daemon=True)
            self._accepting.start()

    def connect(self, address: bytes) -> CollectiveLink:
        """Makes a group with the peer."""
        peer = Address.unpack(address)
        if peer.backend != self._groups.backend:
            raise TransportError(f"the peer uses {peer.backend}, this worker {self._groups.backend}")
        with self._lock:
            self._check_open()
        try:
            sock = socket.create_connection((peer.host, peer.control_port), timeout=OPEN_TIMEOUT_S)
        except OSError as exc:
            raise TransportError(f"nobody serves at this address: {exc}") from exc
        try:
            return self._open_link(sock, self._meet(sock, peer))
        except (OSError, TransportError) as exc:
            sock.close()
            raise exc if isinstance(exc, TransportError) else TransportError(f"the peer is gone: {exc}") from exc

    def _meet(self, sock: socket.socket, peer: Address) -> Group:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = draw_name()
        send_hello(sock, peer.token, name)
        store = open_store(peer.host, peer.store_port, is_master=False) if peer.store_port else None
        group = self._groups.open(sock, store, name, SOURCE_RANK)
        sock.settimeout(None)
        return group

    def _open_link(self, sock: socket.socket, group: Group) -> CollectiveLink:
        link = CollectiveLink(
            sock,
            group,
            detail=f"{self._groups.backend}, tcp" if self._groups.backend == "gloo" else "nccl",
            device=self._groups.device,
            on_closed=self._links.discard,
        )
        with self._lock:
            self._check_open()
            self._links.add(link)
        link.start()
        return link

    def quiesce(self, handoff_id: HandoffId) -> Future[None]:
        """Placed memory is only written from a buffer: what is being copied is waited for."""
        return self._writers.when_quiet(handoff_id)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links, sources = list(self._links), list(self._sources)
        for link in links:
            link.end("the transport was closed")
        for source in sources:
            source.end()
        self._stop_accepting()
        deadline = time.monotonic() + _JOIN_S
        for link in links:
            link.join(deadline)
        for source in sources:
            source.join(deadline)
        self._groups.close()
        del self._store

    def _stop_accepting(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # nobody was listening
        if self._accepting is not None:
            self._accepting.join(_JOIN_S)
        self._listener.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed("the transport is closed")

    def _accept_all(self, sink: Sink) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if not self._closed:
                    logger.error("the collective transport accepts nobody any more: %s", exc)
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            source = CollectiveSource(
                sock, sink=sink, writers=self._writers, device=self._groups.device, on_closed=self._sources.discard
            )
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._sources.add(source)
            source.start(self._token, lambda sock, name: self._groups.open(sock, self._store, name, DESTINATION_RANK))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
