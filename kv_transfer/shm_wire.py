"""Frames of the shared-memory transport: one packet each on a Unix SOCK_SEQPACKET socket. Pure.

    sender -> receiver   SLAB id            (its memfd travels beside it)
                         MESSAGE number, header, pieces
                         FORGET id          (a slab that no later message names)
    receiver -> sender   ACK number         (the receiver no longer reads the pieces)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kv_transfer.transport import HEADER_BYTES, MessageHeader
from tandem.errors import TransportError

_KIND_SLAB, _KIND_MESSAGE, _KIND_FORGET, _KIND_ACK = b"SMFA"
_NUMBER = struct.Struct("<BQ")
_MESSAGE = struct.Struct(f"<BQ{HEADER_BYTES}s")
_PIECE = struct.Struct("<QQQ")
MAX_PIECES = 2048
"""More pieces than this are gathered by the sender first; bounds the size of a packet."""
MAX_FRAME_BYTES = _MESSAGE.size + MAX_PIECES * _PIECE.size


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabFrame:
    slab_id: int

    def pack(self) -> bytes:
        return _NUMBER.pack(_KIND_SLAB, self.slab_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetFrame:
    slab_id: int

    def pack(self) -> bytes:
        return _NUMBER.pack(_KIND_FORGET, self.slab_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class AckFrame:
    number: int

    def pack(self) -> bytes:
        return _NUMBER.pack(_KIND_ACK, self.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageFrame:
    """`pieces` are (slab id, offset, length), in the order of the payload."""

    number: int
    header: MessageHeader
    pieces: Sequence[tuple[int, int, int]]

    def pack(self) -> bytes:
        head = _MESSAGE.pack(_KIND_MESSAGE, self.number, self.header.pack())
        return head + b"".join(_PIECE.pack(*piece) for piece in self.pieces)


Frame: TypeAlias = SlabFrame | ForgetFrame | AckFrame | MessageFrame


def unpack(data: bytes | memoryview) -> Frame:
    """The frame in one packet. Raises TransportError for anything malformed."""
    kind = data[0] if data else None
    if kind == _KIND_MESSAGE:
        return _unpack_message(data)
    if len(data) != _NUMBER.size:
        raise TransportError(f"a malformed frame of {len(data)} bytes")
    number = _NUMBER.unpack(data)[1]
    if kind == _KIND_SLAB:
        return SlabFrame(slab_id=number)
    if kind == _KIND_FORGET:
        return ForgetFrame(slab_id=number)
    if kind == _KIND_ACK:
        return AckFrame(number=number)
    raise TransportError(f"an unknown frame of kind {kind}")


def _unpack_message(data: bytes | memoryview) -> MessageFrame:
    if len(data) < _MESSAGE.size or (len(data) - _MESSAGE.size) % _PIECE.size:
        raise TransportError(f"a malformed message frame of {len(data)} bytes")
    _, number, packed = _MESSAGE.unpack_from(data)
    header = MessageHeader.unpack(packed)
    pieces = list(_PIECE.iter_unpack(data[_MESSAGE.size :]))
    if sum(length for _, _, length in pieces) != header.num_bytes:
        raise TransportError("the pieces of a message do not add up to its size")
    return MessageFrame(number=number, header=header, pieces=pieces)
