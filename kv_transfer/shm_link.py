"""The sending half of the shared-memory transport: one link, one socket, frames out and acknowledgements in.

A message whose memory the peer can map leaves on the caller's thread, without waking the transport's: on a busy machine
each wake-up costs more than copying a layer. What must be gathered, or does not fit the socket or the window, waits
for the transport's thread. Futures end outside of the link's lock, because their callbacks may send.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

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

_Place: TypeAlias = tuple[Slab, int, int]
"""A slab, an offset in it and a length."""


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
        self._lock = threading.Lock()
        self._watching_output = False
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
        if not self._send_now(send) and not self._thread.post(lambda: self._enqueue(send)):
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
        with self._lock:
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
                self._pump()
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
        with self._lock:
            transient = self._under_way.pop(number)
            if transient is not None:
                self._frames.append((ForgetFrame(slab_id=transient.slab_id).pack(), None))
                transient.close()
        self._outbox.finish(number)

    def _send_now(self, send: _Send) -> bool:
        """Sends from the caller's thread. False when the transport's thread must."""
        with self._lock:
            if self._sock.fileno() < 0 or self._waiting or self._frames or len(self._under_way) >= _MAX_UNDER_WAY:
                return False
            places = self._places(send.views)
            if places is None:
                return False
            self._frame(send, places, None)
            try:
                is_sent = self._flush()
            except OSError as exc:
                logger.debug("a send failed, the transport's thread will end the link: %s", exc)
                is_sent = False
        if not is_sent:
            self._thread.post(self._pump_guarded)
        return True

    def _enqueue(self, send: _Send) -> None:
        with self._lock:
            if self._sock.fileno() < 0:
                return
            self._waiting.append(send)
        self._pump_guarded()

    def _pump_guarded(self) -> None:
        try:
            self._pump()
        except (OSError, TransportError) as exc:
            self.end(f"the peer is gone: {exc}")

    def _pump(self) -> None:
        """Sends what waits, as far as the window and the socket take it; on the transport's thread."""
        while (send := self._next_waiting()) is not None:
            try:
                places, transient = self._readable(send)
            except OSError as exc:
                self._outbox.finish(send.number, TransportError(f"no memory to send from: {exc}"))
                continue
            with self._lock:
                self._frame(send, places, transient)
        with self._lock:
            if self._sock.fileno() >= 0:
                self._watch_output(not self._flush())

    def _next_waiting(self) -> _Send | None:
        with self._lock:
            if self._waiting and len(self._under_way) < _MAX_UNDER_WAY:
                return self._waiting.popleft()
            return None

    def _places(self, views: Sequence[Bytes]) -> list[_Place] | None:
        """Where in our slabs the payload lies; None when some of it does not, or it has too many pieces."""
        if len(views) > MAX_PIECES:
            return None
        found = [self._slabs.find(view) for view in views]
        places = [(*place, view.nbytes) for place, view in zip(found, views, strict=True) if place]
        return places if len(places) == len(views) else None

    def _readable(self, send: _Send) -> tuple[list[_Place], Slab | None]:
        """Where the peer can read the payload: where it lies, or else in a slab of its own, into which it is copied."""
        places = self._places(send.views)
        if places is not None:
            return places, None
        transient = self._slabs.transient(send.header.num_bytes)
        copy([transient.view], send.views, with_digest=False)
        self._outbox.gathered()
        return [(transient, 0, send.header.num_bytes)], transient

    def _frame(self, send: _Send, places: list[_Place], transient: Slab | None) -> None:
        """Queues the frames of one message: the slabs that the peer does not have yet, then the message."""
        for slab, _, _ in places:
            if slab.slab_id not in self._given:
                self._frames.append((SlabFrame(slab_id=slab.slab_id).pack(), slab.fd))
                if slab is not transient:
                    self._given.add(slab.slab_id)
        pieces = [(slab.slab_id, offset, length) for slab, offset, length in places]
        frame = MessageFrame(number=send.number, header=send.header, pieces=pieces)
        self._under_way[send.number] = transient
        self._frames.append((frame.pack(), None))

    def _flush(self) -> bool:
        """Sends frames. False when the socket is full."""
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
                return False
            self._frames.popleft()
        return True

    def _watch_output(self, wanted: bool) -> None:
        if wanted != self._watching_output:
            self._watching_output = wanted
            self._thread.modify(self._sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
