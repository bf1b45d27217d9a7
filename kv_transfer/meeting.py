"""Where the two sides of a link meet to make a process group: a store of torch.distributed over their control socket.

torch's own store for two processes listens on a port that anybody may write to, and asks for the names of its peers'
hosts: where nobody answers such questions, it answers nobody either, for seconds. This one is a socket that both sides
have already, and ends with the meeting.

    both sides    NOTE key, value    whatever the group writes into the store
                  END                once, when this side's group stands
"""

from __future__ import annotations

import socket
import struct
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from kv_transfer.collective_wire import receive_exactly
from tandem.errors import LinkClosed, TransportError

_NOTE, _END = b"N", b"E"
_SIZES = struct.Struct("<HI")
_LENGTH = struct.Struct("<Q")
_MAX_VALUE_BYTES = 1 << 16
_MAX_NOTES = 64
_FAMILY_BYTES = 2


class Meeting(Store):
    """One side of it, for one thread. It lasts no longer than the socket's timeout at its beginning.

    Gloo reads what the other side wrote without a look at where it ends: what differs in form from what this side
    wrote is refused.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        timeout_s = sock.gettimeout()
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._values: dict[str, bytes] = {}
        self._own: bytes | None = None
        """What this side wrote last."""
        self._is_over = False
        """Whether the other side has said END."""

    def set(self, key: str, value: str | bytes) -> None:
        """Tells the other side. Raises LinkClosed when it is gone."""
        data, name = value.encode() if isinstance(value, str) else bytes(value), key.encode()
        self._values[key] = self._own = data
        self._send(_NOTE + _SIZES.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """Waits for the other side to set it, if nobody has. Raises LinkClosed and TransportError."""
        while key not in self._values:
            self._receive()
        value = self._values[key]
        if self._own is not None and _form(value) != _form(self._own):
            raise TransportError("the peer does not speak this transport's protocol")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all are set. Raises LinkClosed and TransportError; `timeout` is the socket's."""
        for key in keys:
            self.get(key)

    def end(self) -> None:
        """When this side's group stands: returns when the other's does. Raises LinkClosed and TransportError."""
        self._send(_END)
        while not self._is_over:
            self._receive()

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as exc:
            raise LinkClosed(f"the peer is gone: {exc}") from exc

    def _receive(self) -> None:
        """The next thing that the other side says."""
        if self._is_over:
            raise TransportError("the peer's process group stands, and ours lacks its word")
        kind = self._take(1)
        if kind == _END:
            self._is_over = True
            return
        if kind != _NOTE:
            raise TransportError("the peer does not speak this transport's protocol")
        num_name, num_value = _SIZES.unpack(self._take(_SIZES.size))
        if num_value > _MAX_VALUE_BYTES or len(self._values) >= _MAX_NOTES:
            raise TransportError("the peer says too much for a meeting")
        try:
            name = self._take(num_name).decode()
        except UnicodeDecodeError as exc:
            raise TransportError("the peer does not speak this transport's protocol") from exc
        self._values[name] = self._take(num_value)

    def _take(self, count: int) -> bytes:
        return receive_exactly(self._sock, count, deadline_s=self._deadline_s)


def _form(value: bytes) -> tuple[int, ...]:
    """What a side of a Gloo group says of itself, but for its host's name: how long its parts are, and what kind.

    Name and address, each after its length, the address with its family first; then a number for each connection.
    """
    name_bytes = _LENGTH.unpack_from(value)[0] if len(value) >= _LENGTH.size else 0
    address_at = 2 * _LENGTH.size + name_bytes
    if len(value) < address_at + _FAMILY_BYTES:
        return ()
    (address_bytes,) = _LENGTH.unpack_from(value, address_at - _LENGTH.size)
    family = int.from_bytes(value[address_at : address_at + _FAMILY_BYTES], "little")
    return address_bytes, family in (socket.AF_INET, socket.AF_INET6), len(value) - address_at
