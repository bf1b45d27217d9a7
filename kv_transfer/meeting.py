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
from datetime import timedelta

from torch._C._distributed_c10d import Store

from kv_transfer.collective_wire import receive_exactly
from tandem.errors import LinkClosed, TransportError

_NOTE, _END = b"N", b"E"
_SIZES = struct.Struct("<HI")
_MAX_VALUE_BYTES = 1 << 20
_MAX_NOTES = 1024


class Meeting(Store):
    """One side of it, for one thread; how long it waits for the other one is up to the socket's timeout."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._values: dict[str, bytes] = {}
        self._is_over = False
        """Whether the other side has said END."""

    def set(self, key: str, value: str | bytes) -> None:
        """Tells the other side. Raises LinkClosed when it is gone."""
        data, name = value.encode() if isinstance(value, str) else bytes(value), key.encode()
        self._values[key] = data
        self._send(_NOTE + _SIZES.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """Waits for the other side to set it, if nobody has. Raises LinkClosed and TransportError."""
        while key not in self._values:
            self._receive()
        return self._values[key]

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
        kind = receive_exactly(self._sock, 1)
        if kind == _END:
            self._is_over = True
            return
        if kind != _NOTE:
            raise TransportError("the peer does not speak this transport's protocol")
        num_name, num_value = _SIZES.unpack(receive_exactly(self._sock, _SIZES.size))
        if num_value > _MAX_VALUE_BYTES or len(self._values) >= _MAX_NOTES:
            raise TransportError("the peer says too much for a meeting")
        try:
            name = receive_exactly(self._sock, num_name).decode()
        except UnicodeDecodeError as exc:
            raise TransportError("the peer does not speak this transport's protocol") from exc
        self._values[name] = receive_exactly(self._sock, num_value)
