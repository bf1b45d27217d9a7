"""The connection between rank 0 and another rank of its worker: frames both ways, and the end of either as a fact.

Whoever connects shows that it holds the cluster's key, and is shown the same, before anything else is read. A process
that dies closes its connections, so the other side knows at once; nothing here waits for a heartbeat.

    frame    length (4 bytes), kind (1 byte), payload
    hello    a nonce each way, then a code over both nonces and the rank each way (HMAC with the cluster's key)
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from enum import IntEnum

from tandem.errors import ForeignCall, LinkClosed, TransportError
from tandem.secret import MAC_BYTES, ClusterKey, same

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<IB")
_HELLO = struct.Struct("<4sI16s")
_MAGIC = b"TRK1"
_PURPOSE = "worker-rank"
HELLO_TIMEOUT_S = 10.0
MAX_FRAME_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20


class Kind(IntEnum):
    """What a frame is. Payloads of HANDOFF are `kv_transfer`'s, all others this package's."""

    BATCH = 1
    """Run this iteration."""
    COPY = 2
    """Copy these blocks."""
    HANDOFF = 3
    """Something about a handoff, in order with batches where it says so."""
    STOP = 4
    """End in good order."""
    READY = 5
    """To rank 0: the model is loaded."""
    FAILED = 6
    """To rank 0: it could not be."""
    SWAP_ROOM = 7
    """Make host memory for so many blocks."""
    SWAP_OUT = 8
    """Copy these blocks into these slots of it, and say DONE."""
    SWAP_IN = 9
    """Copy these slots into these blocks."""
    DONE = 10
    """To rank 0: the copies are made."""


OnFrame = Callable[[Kind, bytes], None]
OnEnd = Callable[[TransportError], None]


class RankChannel:
    """One connected, authenticated socket, which it owns. `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._closed = False

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame. Raises LinkClosed when the other side is gone."""
        data = _HEAD.pack(len(payload), kind) + payload
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError as exc:
            raise LinkClosed(f"the other rank is gone: {exc}") from exc

    def follow(self, on_frame: OnFrame, on_end: OnEnd, *, name: str) -> threading.Thread:
        """Reads on a thread of its own until the other side is gone; then calls `on_end`, unless we closed first."""

        def run() -> None:
            try:
                while True:
                    on_frame(*self._receive())
            except TransportError as exc:
                if not self._closed:
                    on_end(exc)
            except Exception as exc:
                logger.exception("a frame of another rank could not be taken")
                on_end(TransportError(f"a frame could not be taken: {exc}"))

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _receive(self) -> tuple[Kind, bytes]:
        length, kind = _HEAD.unpack(receive_exactly(self._sock, _HEAD.size))
        if length > MAX_FRAME_BYTES or kind not in iter(Kind):
            raise TransportError(f"not a frame: kind {kind}, {length} bytes")
        return Kind(kind), receive_exactly(self._sock, length)

    def close(self) -> None:
        """Idempotent; the other side's `on_end` follows."""
        self._closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was quicker
        self._sock.close()


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes. Raises LinkClosed when the other side closed or went."""
    data = bytearray()
    while len(data) < count:
        try:
            piece = sock.recv(min(count - len(data), 1 << 20))
        except OSError as exc:
            raise LinkClosed(f"the other rank is gone: {exc}") from exc
        if not piece:
            raise LinkClosed("the other rank has ended")
        data += piece
    return bytes(data)


def _ready(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def _code(key: ClusterKey, who: bytes, rank: int, nonces: bytes) -> bytes:
    return key.mac(_PURPOSE, [who, rank.to_bytes(4, "little"), nonces])


def connect(address: tuple[str, int], key: ClusterKey, rank: int) -> RankChannel:
    """Joins rank 0. Raises TransportError when it is not there, ForeignCall when it lacks the key."""
    try:
        sock = socket.create_connection(address, timeout=HELLO_TIMEOUT_S)
    except OSError as exc:
        raise TransportError(f"rank 0 is not at {address[0]}:{address[1]}: {exc}") from exc
    try:
        own = secrets.token_bytes(16)
        sock.sendall(_HELLO.pack(_MAGIC, rank, own))
        nonces = own + receive_exactly(sock, 16)
        if not same(_code(key, b"rank 0", rank, nonces), receive_exactly(sock, MAC_BYTES)):
            raise ForeignCall("rank 0 does not hold this cluster's key")
        sock.sendall(_code(key, b"rank", rank, nonces))
        _ready(sock)
    except BaseException:
        sock.close()
        raise
    return RankChannel(sock)


def accept(sock: socket.socket, key: ClusterKey) -> tuple[int, RankChannel]:
    """Welcomes whoever connected; its rank. Closes the socket and raises TransportError or ForeignCall otherwise."""
    try:
        sock.settimeout(HELLO_TIMEOUT_S)
        magic, rank, theirs = _HELLO.unpack(receive_exactly(sock, _HELLO.size))
        if magic != _MAGIC:
            raise TransportError("not a rank of a worker")
        own = secrets.token_bytes(16)
        sock.sendall(own + _code(key, b"rank 0", rank, theirs + own))
        if not same(_code(key, b"rank", rank, theirs + own), receive_exactly(sock, MAC_BYTES)):
            raise ForeignCall("a connection without this cluster's key")
        _ready(sock)
    except BaseException:
        sock.close()
        raise
    return rank, RankChannel(sock)
