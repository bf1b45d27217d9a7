"""The shared-memory transport ("shm"): two processes on one host, one copy, done by the receiver.

Slabs are memfds. The sender passes each to a peer once and then sends frames that say where in them a payload lies;
the receiver copies from the sender's slab into the placed memory on its own thread and acknowledges. Because nobody
but the receiver writes its memory, fencing is exact.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
from concurrent.futures import Future

import torch

from kv_transfer.memfd import SlabTable
from kv_transfer.progress import ProgressThread
from kv_transfer.shm_link import ShmLink
from kv_transfer.shm_source import ShmSource, peer_uid
from kv_transfer.transport import Sink
from tandem.errors import LinkClosed, TransportError
from tandem.types import HandoffId, WorkerId

logger = logging.getLogger(__name__)

_ADDRESS_PREFIX = b"tandem-shm/1/"
_CONNECT_TIMEOUT_S = 5.0
_BACKLOG = 512
_SEND_BUFFER_BYTES = 1 << 20


class ShmTransport:
    """See `kv_transfer.transport.Transport`. Peers must run as the same user on the same host and network namespace."""

    name = "shm"

    def __init__(self, *, worker_id: WorkerId) -> None:
        self._address = _ADDRESS_PREFIX + f"{os.getpid()}/{secrets.token_hex(16)}".encode()
        self._lock = threading.Lock()
        self._closed = False
        self._slabs = SlabTable()
        self._links: set[ShmLink] = set()
        self._sources: set[ShmSource] = set()
        self._listener: socket.socket | None = None
        self._sink: Sink | None = None
        self._thread = ProgressThread(f"shm-{worker_id}")
        self._thread.start()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A memfd-backed tensor. Raises TransportError when there is no memory for it or the transport is closed."""
        with self._lock:
            self._check_open()
            try:
                return self._slabs.add(num_bytes).tensor()
            except (OSError, ValueError) as exc:
                raise TransportError(f"{num_bytes} bytes of shared memory cannot be had: {exc}") from exc

    def lend(self, fd: int, memory: torch.Tensor) -> None:
        """Peers map it. Raises TransportError when the transport is closed or descriptors run out."""
        with self._lock:
            self._check_open()
            try:
                self._slabs.lend(fd, memory.numpy())
            except OSError as exc:
                raise TransportError(f"the memory cannot be lent: {exc}") from exc

    def address(self) -> bytes:
        """Name of the listening socket; unguessable."""
        return self._address

    def serve(self, sink: Sink) -> None:
        """Listens in the abstract socket namespace. Raises TransportError when called twice or after `close`."""
        with self._lock:
            self._check_open()
            if self._listener is not None:
                raise TransportError("serve was called twice")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            listener.bind(b"\0" + self._address)
            listener.listen(_BACKLOG)
            self._listener, self._sink = listener, sink
        self._thread.post(lambda: self._thread.register(listener.fileno(), select.EPOLLIN, self._accept))

    def connect(self, address: bytes) -> ShmLink:
        """Connects a socket of its own for this link."""
        if not address.startswith(_ADDRESS_PREFIX) or len(address) > 100:
            raise TransportError("not an address of the shm transport", param="address")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(_CONNECT_TIMEOUT_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            sock.connect(b"\0" + address)
            if peer_uid(sock) != os.getuid():
                raise TransportError("the peer runs as another user")
            sock.setblocking(False)
            return self._open_link(sock)
        except OSError as exc:
            sock.close()
            raise TransportError(f"nobody serves at this address: {exc}") from exc
        except TransportError:
            sock.close()
            raise

    def quiesce(self, handoff_id: HandoffId) -> Future[None]:
        """Resolves at the thread's next turn: messages are copied whole within one turn, so none is half written."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        if not self._thread.post(lambda: future.set_result(None)):
            future.set_result(None)
        return future

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._thread.post(self._close_all)
        self._thread.stop()
        self._slabs.close()

    def _open_link(self, sock: socket.socket) -> ShmLink:
        link = ShmLink(sock, self._slabs, self._thread, on_closed=self._links.discard)
        with self._lock:
            self._check_open()
            self._links.add(link)
            self._thread.post(link.start)
        return link

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed("the transport is closed")

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        assert self._sink is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            logger.warning("a connection could not be accepted: %s", exc)
            return
        sock.setblocking(False)
        if peer_uid(sock) != os.getuid():
            logger.warning("refused a connection of user %d", peer_uid(sock))
            sock.close()
            return
        source = ShmSource(sock, self._sink, self._thread, on_closed=self._sources.discard)
        self._sources.add(source)
        source.start()

    def _close_all(self) -> None:
        if self._listener is not None:
            self._thread.unregister(self._listener.fileno())
            self._listener.close()
        for link in list(self._links):
            link.end("the transport was closed")
        for source in list(self._sources):
            source.end()
