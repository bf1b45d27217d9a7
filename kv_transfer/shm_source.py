"""The receiving half of the shared-memory transport: one connected source, its slabs, and the copy out of them."""

from __future__ import annotations

import array
import logging
import select
import socket
import struct
from collections.abc import Callable

from kv_transfer import placing
from kv_transfer.memfd import map_peer
from kv_transfer.progress import EVENTS_ERROR, ProgressThread
from kv_transfer.segments import Bytes, check_digest, copy
from kv_transfer.shm_wire import MAX_FRAME_BYTES, AckFrame, ForgetFrame, Frame, MessageFrame, SlabFrame, unpack
from kv_transfer.transport import Sink
from tandem.errors import LinkClosed, TransportError

logger = logging.getLogger(__name__)

_MAX_SLABS = 1024
_TURN_BYTES = 8 << 20
"""Copied, and then acknowledged together, before other connections get their turn."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)
_UCRED = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket."""
    return int(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


class ShmSource:
    """One connection of a peer that sends to us; lives on the transport's thread and copies there.

    Only this thread ever writes placed memory, and a message is placed, copied and reported in one go: between two
    events of the thread nothing is being written. That is what makes `quiesce` exact.
    """

    def __init__(
        self, sock: socket.socket, sink: Sink, thread: ProgressThread, *, on_closed: Callable[[ShmSource], None]
    ) -> None:
        self._sock = sock
        self._sink = sink
        self._thread = thread
        self._on_closed = on_closed
        self._slabs: dict[int, Bytes] = {}
        self._acks: list[bytes] = []
        self._watching_output = False
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)
        self._buffer = memoryview(bytearray(MAX_FRAME_BYTES))

    def start(self) -> None:
        """Watches the socket."""
        self._thread.register(self._sock.fileno(), select.EPOLLIN, self._on_ready)

    def end(self) -> None:
        """Closes the connection and lets go of the source's memory."""
        if self._sock.fileno() >= 0:
            self._thread.unregister(self._sock.fileno())
            self._sock.close()
            self._slabs.clear()
            self._on_closed(self)

    def _on_ready(self, events: int) -> None:
        """Takes what is there, but not much at once: other connections get their turn between two large copies."""
        try:
            if events & (select.EPOLLIN | EVENTS_ERROR):
                self._take_some()
            else:
                self._flush()
        except (ConnectionError, LinkClosed) as exc:
            logger.info("a source closed its link with messages unread: %s", str(exc))
            self.end()
        except (OSError, TransportError) as exc:
            logger.warning("closing a connection of the shared-memory transport: %s", str(exc))
            self.end()

    def _take_some(self) -> None:
        """Takes frames until there are none, or the turn is over. Ends the connection where the source did."""
        num_bytes = 0
        self._check_hung_up()
        while num_bytes < _TURN_BYTES:
            try:
                size, fds = self._receive()
            except BlockingIOError:
                break
            if not size:
                self.end()
                return
            num_bytes += self._take(unpack(self._buffer[:size]), fds)
        self._flush()

    def _take(self, frame: Frame, fds: list[int]) -> int:
        """Bytes that were copied."""
        if isinstance(frame, SlabFrame):
            self._add_slab(frame.slab_id, fds)
        elif fds:
            _close_all(fds)
            raise TransportError("a descriptor beside a frame that has none")
        elif isinstance(frame, MessageFrame):
            self._take_message(frame)
            return frame.header.num_bytes
        elif isinstance(frame, ForgetFrame):
            self._slabs.pop(frame.slab_id, None)
        else:
            raise TransportError("an acknowledgement from a source")
        return 0

    def _receive(self) -> tuple[int, list[int]]:
        """The size of the next frame, which is then in the buffer, and the descriptors beside it."""
        size, ancillary, flags, _ = self._sock.recvmsg_into([self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            _close_all(fds.tolist())
            raise TransportError("a frame that is too long")
        return size, fds.tolist()

    def _add_slab(self, slab_id: int, fds: list[int]) -> None:
        if len(fds) != 1 or slab_id in self._slabs or len(self._slabs) >= _MAX_SLABS:
            _close_all(fds)
            raise TransportError("a slab without one descriptor, known already, or one too many")
        self._slabs[slab_id] = map_peer(fds[0])

    def _take_message(self, frame: MessageFrame) -> None:
        sources = [self._piece(*piece) for piece in frame.pieces]
        targets = placing.place(self._sink, frame.header)
        if targets is not None:
            placing.landed(self._sink, frame.header, self._copy(frame, targets, sources))
        self._acks.append(AckFrame(number=frame.number).pack())

    def _copy(self, frame: MessageFrame, targets: list[Bytes], sources: list[Bytes]) -> TransportError | None:
        expected = frame.header.digest
        actual = copy(targets, sources, with_digest=expected != 0)
        try:
            self._check_hung_up()
        except LinkClosed as error:
            return error
        return check_digest(expected, actual)

    def _piece(self, slab_id: int, offset: int, length: int) -> Bytes:
        slab = self._slabs.get(slab_id)
        if slab is None or offset + length > slab.nbytes:
            raise TransportError(f"a piece outside of what was shared (slab {slab_id})")
        return slab[offset : offset + length]

    def _check_hung_up(self) -> None:
        """Raises LinkClosed when the source has closed its end, after which its memory may change."""
        if self._hang_up.poll(0):
            raise LinkClosed("the source closed the link")

    def _flush(self) -> None:
        """Acknowledges; on a busy machine each one wakes the source up, so several go together."""
        while self._acks:
            try:
                self._sock.send(self._acks[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._watch_output(True)
                return
            self._acks.pop(0)
        self._watch_output(False)

    def _watch_output(self, wanted: bool) -> None:
        if wanted != self._watching_output:
            self._watching_output = wanted
            self._thread.modify(self._sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        socket.close(fd)
