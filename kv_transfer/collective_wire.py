"""What travels on a link's control socket beside its process group, and the transport's address. Pure but for sockets.

    source -> destination   HELLO token, name          once; then both meet (`meeting.py`)
                            HEADER                     then its payload through the process group
    destination -> source   ACK                        one for each payload, in order
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import time
from dataclasses import dataclass

from kv_transfer.transport import HEADER_BYTES, MessageHeader
from tandem.errors import LinkClosed, TransportError

TOKEN_BYTES = 16
NAME_BYTES = 8
ACK = b"A"
_SHORTEST_WAIT_S = 0.001
_ADDRESS = re.compile(
    rb"tandem-collective/2/(?P<backend>gloo|nccl)/(?P<control>\d{1,5})/(?P<store>\d{1,5})/(?P<token>[0-9a-f]{32})/"
    rb"(?P<host>[0-9A-Za-z.:-]{1,255})"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a serving transport is met. The token is drawn by it and known to who has the ticket.

    NCCL's groups are made through a store of torch.distributed; `store_port` is 0 where there is none.
    """

    backend: str
    host: str
    control_port: int
    store_port: int
    token: bytes

    def pack(self) -> bytes:
        """ASCII."""
        ports = f"{self.control_port}/{self.store_port}"
        return f"tandem-collective/2/{self.backend}/{ports}/{self.token.hex()}/{self.host}".encode()

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        """Inverse of `pack`. Raises TransportError for anything else."""
        match = _ADDRESS.fullmatch(data)
        if match is None or max(int(match["control"]), int(match["store"])) > 65535:
            raise TransportError("not an address of the collective transport", param="address")
        return cls(
            backend=match["backend"].decode(),
            host=match["host"].decode(),
            control_port=int(match["control"]),
            store_port=int(match["store"]),
            token=bytes.fromhex(match["token"].decode()),
        )


def draw_name() -> str:
    """A name for one link."""
    return secrets.token_hex(NAME_BYTES)


def send_hello(sock: socket.socket, token: bytes, name: str) -> None:
    """Opens a link. Raises OSError."""
    sock.sendall(token + bytes.fromhex(name))


def receive_hello(sock: socket.socket, token: bytes) -> str:
    """The link's name. Raises TransportError for a stranger, OSError when it is gone."""
    data = receive_exactly(sock, TOKEN_BYTES + NAME_BYTES)
    if not hmac.compare_digest(data[:TOKEN_BYTES], token):
        raise TransportError("a connection without the transport's token")
    return data[TOKEN_BYTES:].hex()


def receive_header(sock: socket.socket) -> MessageHeader:
    """The next message's. Raises LinkClosed at the end, TransportError for anything else."""
    return MessageHeader.unpack(receive_exactly(sock, HEADER_BYTES))


def receive_exactly(sock: socket.socket, count: int, *, deadline_s: float | None = None) -> bytes:
    """`count` bytes. Raises LinkClosed when the other side closed or went.

    Each piece may take as long as the socket's timeout; with a deadline, of the monotonic clock, all of them together.
    """
    data = bytearray()
    while len(data) < count:
        try:
            if deadline_s is not None:
                sock.settimeout(max(_SHORTEST_WAIT_S, deadline_s - time.monotonic()))
            piece = sock.recv(count - len(data))
        except OSError as exc:
            raise LinkClosed(f"the peer is gone: {exc}") from exc
        if not piece:
            raise LinkClosed("the peer closed the link")
        data += piece
    return bytes(data)
