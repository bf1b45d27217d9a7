"""Tags and control messages of the UCX transport. Pure.

Each link draws a nonce. Control messages of all links share one tag; a payload's tag is (nonce, number), so it meets
its own memory and no other's. On each link: HELLO, then MESSAGES and the payloads they announce, then BYE.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TypeAlias

from kv_transfer.host import IDENTITY_BYTES, ProcessIdentity
from kv_transfer.transport import HEADER_BYTES, MessageHeader
from tandem.errors import TransportError

CONTROL_TAG = 1 << 62
PAYLOAD_TAG = 1 << 63
PAYLOAD_MASK = 1 << 63
NONCE_BITS = 38
_NUMBER_BITS = 24

_MAGIC = b"TUC2"
_PREFIX = struct.Struct("<4sBQ")
_HELLO = struct.Struct(f"<4sBQ?{IDENTITY_BYTES}s")
_MESSAGE = struct.Struct(f"<Q{HEADER_BYTES}s")
_KIND_HELLO, _KIND_MESSAGE, _KIND_BYE = 1, 2, 3
HELLO_BYTES = 16384
"""A HELLO is padded to this, past the rendezvous threshold, so that its send completes only when somebody took it."""
MAX_ANNOUNCED = 32
"""Their announcement is well below the rendezvous threshold."""
_ADDRESS_PREFIX = b"tandem-ucx/2/"
_CHECKSUM_BYTES = 8


def payload_tag(nonce: int, number: int) -> int:
    """The tag of a link's `number`-th payload; numbers repeat after 2**24, long after the first has ended."""
    return PAYLOAD_TAG | nonce << _NUMBER_BITS | number & ((1 << _NUMBER_BITS) - 1)


def tag_nonce(tag: int) -> int:
    """The link's nonce in a payload tag."""
    return tag >> _NUMBER_BITS & ((1 << NONCE_BITS) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Opens a link. With `reads_remote` the receiver fetches large payloads by itself."""

    nonce: int
    reads_remote: bool
    identity: ProcessIdentity

    def pack(self) -> bytes:
        head = _HELLO.pack(_MAGIC, _KIND_HELLO, self.nonce, self.reads_remote, self.identity.pack())
        return head.ljust(HELLO_BYTES, b"\0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Announce:
    """Payloads follow, each under `payload_tag(nonce, number)`: their numbers and headers, at most MAX_ANNOUNCED."""

    nonce: int
    messages: tuple[tuple[int, MessageHeader], ...]

    def pack(self) -> bytes:
        each = [_MESSAGE.pack(number, header.pack()) for number, header in self.messages]
        return _PREFIX.pack(_MAGIC, _KIND_MESSAGE, self.nonce) + b"".join(each)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bye:
    """The link is closed: the memory of `withdrawn` messages, announced before, is no longer what was announced."""

    nonce: int
    withdrawn: tuple[int, ...]

    def pack(self) -> bytes:
        return _PREFIX.pack(_MAGIC, _KIND_BYE, self.nonce) + struct.pack(f"<{len(self.withdrawn)}Q", *self.withdrawn)


Control: TypeAlias = Hello | Announce | Bye
MAX_CONTROL_BYTES = HELLO_BYTES


def unpack(data: bytes) -> Control:
    """The control message in `data`. Raises TransportError for anything malformed."""
    if len(data) < _PREFIX.size:
        raise TransportError(f"a malformed control message of {len(data)} bytes")
    magic, kind, nonce = _PREFIX.unpack_from(data)
    if magic != _MAGIC or nonce >> NONCE_BITS:
        raise TransportError(f"not a control message of this transport (magic {magic!r})")
    if kind == _KIND_HELLO and len(data) == HELLO_BYTES:
        _, _, _, reads_remote, identity = _HELLO.unpack_from(data)
        return Hello(nonce=nonce, reads_remote=reads_remote, identity=ProcessIdentity.unpack(identity))
    if kind == _KIND_MESSAGE and (len(data) - _PREFIX.size) % _MESSAGE.size == 0:
        each = _MESSAGE.iter_unpack(data[_PREFIX.size :])
        return Announce(nonce=nonce, messages=tuple((number, MessageHeader.unpack(header)) for number, header in each))
    if kind == _KIND_BYE and (len(data) - _PREFIX.size) % 8 == 0:
        count = (len(data) - _PREFIX.size) // 8
        return Bye(nonce=nonce, withdrawn=struct.unpack_from(f"<{count}Q", data, _PREFIX.size))
    raise TransportError(f"a malformed control message of kind {kind}, {len(data)} bytes")


def pack_address(identity: ProcessIdentity, worker_address: bytes) -> bytes:
    """What travels in the ticket. With a checksum, because UCX ends the process over an address that is damaged."""
    body = identity.pack() + worker_address
    return _ADDRESS_PREFIX + _checksum(body) + body


def unpack_address(address: bytes) -> tuple[ProcessIdentity, bytes]:
    """Inverse of `pack_address`. Raises TransportError for anything else."""
    start = len(_ADDRESS_PREFIX)
    checksum, body = address[start : start + _CHECKSUM_BYTES], address[start + _CHECKSUM_BYTES :]
    if not address.startswith(_ADDRESS_PREFIX) or checksum != _checksum(body) or len(body) <= IDENTITY_BYTES:
        raise TransportError("not an address of the ucx transport", param="address")
    return ProcessIdentity.unpack(body[:IDENTITY_BYTES]), body[IDENTITY_BYTES:]


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES, person=b"tandem-ucx-addr").digest()
