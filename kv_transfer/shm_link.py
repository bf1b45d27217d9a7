"""The sending half of the shared-memory transport: one link, one socket, frames out and acknowledgements in."""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kv_transfer.memfd import Slab, SlabTable
from kv_transfer.outbox import Outbox
from kv_transfer.progress import EVENTS_ERROR, ProgressThread
from kv_transfer.segments import Bytes, as_bytes, copy
from kv_transfer.shm_wire import MAX_PIECES, AckFrame, ForgetFrame, MessageFrame, SlabFrame, unpack
from kv_transfer.transport import LinkStats, MessageHeader
from tandem.errors import TransportError

logger = logging.getLogger(__name__)

_MAX_UNDER_WAY = 64
_CLOSE_WAIT_S = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class _Send:
    number: int
    header: MessageHeader
    views: Sequence[Bytes]


class ShmLink:
    """One direction to one peer over a connected seqpacket socket, which it owns. See `Link`."""

    def __init__(
        self, sock: socket.socket, slabs: SlabTable, thread: ProgressThread, *, on_closed: Callable[[ShmLink], None]
    ) -> None:
        self._sock = sock
        self._slabs = slabs
        self._thread = thread
        self._on_closed = on_closed
        self._outbox = Outbox()
        self._waiting: deque[_Send] = deque()
        self._frames: deque[tuple[bytes, int | None]] = deque()
        self._given: set[int] = set()
        self._under_way: dict[int, Slab | None] = {}

    @property
    def transport(self) -> str:
        return "shm"

    @property
    def detail(self) -> str:
        return "memfd"

    def send(self, header: MessageHeader, segments: Sequence[torch.Tensor]) -> Future[None]:
        number, future = self._outbox.open(header.num_bytes)
        if number is None:
            return future
        try:
            send = _Send(number=number, header=header, views=as_bytes(segments, header.num_bytes))
        except TransportError as error:
            self._outbox.finish(number, error)
            return future
        if not self._thread.post(lambda: self._enqueue(send)):
            self._outbox.close("the transport is closed")
        return future

    def stats(self) -> LinkStats:
        return self._outbox.stats()

    def close(self) -> None:
        self._end_from_outside("the link was closed")

    def start(self) -> None:
        """Watches the socket; on the transport's thread."""
        self._thread.register(self._sock.fileno(), select.EPOLLIN, self._on_ready)

    def end(self, reason: str) -> None:
        """Closes the socket, then fails what is unfinished; on the transport's thread.

        In this order: the receiver takes a message for landed only if the socket was still open after its copy.
        """
        if self._sock.fileno() < 0:
            return
        self._thread.unregister(self._sock.fileno())
        self._sock.close()
        self._waiting.clear()
        self._frames.clear()
        for slab in self._under_way.values():
            if slab is not None:
                slab.close()
        self._under_way.clear()
        self._outbox.close(reason)
        self._on_closed(self)

    def _end_from_outside(self, reason: str) -> None:
        if not self._thread.run_and_wait(lambda: self.end(reason), _CLOSE_WAIT_S):
            # The thread is held up by a sink, or has ended: close the socket's other half of the promise ourselves.
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError as exc:
                logger.debug("shutting down a link: %s", exc)
            self._outbox.close(reason)

    def _on_ready(self, events: int) -> None:
        try:
            if events & (select.EPOLLIN | EVENTS_ERROR):
                self._read_acks()
            if events & select.EPOLLOUT:
                self._flush()
        except (OSError, TransportError) as exc:
            self.end(f"the peer is gone: {exc}")

    def _read_acks(self) -> None:
        while True:
            try:
                data = self._sock.recv(64)
            except BlockingIOError:
                self._pump()
                return
            if not data:
                raise TransportError("it closed the connection")
            frame = unpack(data)
            if not isinstance(frame, AckFrame) or frame.number not in self._under_way:
                raise TransportError("it sent an acknowledgement of nothing")
            self._acknowledged(frame.number)

    def _acknowledged(self, number: int) -> None:
        transient = self._under_way.pop(number)
        if transient is not None:
            self._frames.append((ForgetFrame(slab_id=transient.slab_id).pack(), None))
            transient.close()
        self._outbox.finish(number)

    def _enqueue(self, send: _Send) -> None:
        if self._outbox.closed:
            return
        self._waiting.append(send)
        try:
            self._pump()
        except (OSError, TransportError) as exc:
            self.end(f"the peer is gone: {exc}")

    def _pump(self) -> None:
        while self._waiting and len(self._under_way) < _MAX_UNDER_WAY:
            send = self._waiting.popleft()
            try:
                self._frame(send)
            except OSError as exc:
                self._outbox.finish(send.number, TransportError(f"no memory to send from: {exc}"))
        self._flush()

    def _frame(self, send: _Send) -> None:
        """Queues the frames of one message: the slabs that the peer does not have yet, then the message."""
        found = [self._slabs.find(view) for view in send.views] if len(send.views) <= MAX_PIECES else [None]
        transient: Slab | None = None
        if None in found:
            transient = self._slabs.transient(send.header.num_bytes)
            copy([transient.view], send.views, with_digest=False)
            self._outbox.gathered()
            places = [(transient, 0, send.header.num_bytes)]
        else:
            places = [(*place, view.nbytes) for place, view in zip(found, send.views, strict=True) if place]
        for slab, _, _ in places:
            if slab.slab_id not in self._given:
                self._frames.append((SlabFrame(slab_id=slab.slab_id).pack(), slab.fd))
                if slab is not transient:
                    self._given.add(slab.slab_id)
        pieces = [(slab.slab_id, offset, length) for slab, offset, length in places]
        frame = MessageFrame(number=send.number, header=send.header, pieces=pieces)
        self._under_way[send.number] = transient
        self._frames.append((frame.pack(), None))

    def _flush(self) -> None:
        while self._frames:
            data, fd = self._frames[0]
            try:
                if fd is None:
                    self._sock.send(data, socket.MSG_NOSIGNAL)
                else:
                    socket.send_fds(self._sock, [data], [fd], socket.MSG_NOSIGNAL)
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                    raise
                self._thread.modify(self._sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
                return
            self._frames.popleft()
        self._thread.modify(self._sock.fileno(), select.EPOLLIN)


