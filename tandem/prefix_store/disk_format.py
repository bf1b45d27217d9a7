"""The bytes of a segment: a page about itself, a page about each slot, then the slots' payloads side by side.

    | segment page | slot 0's page | ... | slot n-1's page | payload 0 | ... | payload n-1 |

A payload is written first and its page after it, so a whole page stands for a whole payload. Payloads are neighbours,
so a prefix is read in few large pieces. Pages have 4096 bytes, little-endian; the last eight are xxh3-64 of the rest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

import xxhash

from tandem.kv.hashing import HASH_BYTES
from tandem.kv.segment_log import Place
from tandem.types import BlockHash

PAGE = 4096
"""What offsets, lengths and addresses of direct IO are multiples of."""
VERSION = 1
MAX_TEXT_BYTES = 2048
"""Longest identity and longest tenant."""

_SEGMENT_MAGIC = b"TandemKV"
_BLOCK_MAGIC = b"KVblock1"
_DEAD_MAGIC = b"KVdead01"
_SEGMENT = struct.Struct("<8sIQQIH")
_BLOCK = struct.Struct("<8sQIBQQQ16s16sQH")
_DEAD = struct.Struct("<8sQI")
_DIGEST = struct.Struct("<Q")
_EMPTY = bytes(PAGE)


class SlotState(Enum):
    """What a slot's page says when it names no block."""

    EMPTY = "never written"
    DEAD = "held a block that was evicted or removed"
    DAMAGED = "not what was written"


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes of a segment."""

    block_bytes: int
    num_slots: int

    @property
    def stride(self) -> int:
        """Bytes from one payload to the next."""
        return -(-self.block_bytes // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.payload_offset(self.num_slots)

    def page_offset(self, slot: int) -> int:
        """Where a slot's page begins."""
        return PAGE * (1 + slot)

    def payload_offset(self, slot: int) -> int:
        """Where a slot's payload begins."""
        return PAGE * (1 + self.num_slots) + slot * self.stride


def fit(block_bytes: int, segment_bytes: int) -> Geometry:
    """The segment with most slots in at most `segment_bytes`; it may have none."""
    stride = Geometry(block_bytes=block_bytes, num_slots=0).stride
    return Geometry(block_bytes=block_bytes, num_slots=max(0, (segment_bytes - PAGE) // (PAGE + stride)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentPage:
    """The first page of a segment. `identity` names what its blocks are of."""

    number: int
    geometry: Geometry
    identity: str
    version: int = VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPage:
    """What a slot holds. `clock` is the directory's when the block was stored, `digest` the payload's."""

    name: BlockHash
    parent: BlockHash | None
    tenant: str
    sequence: int
    clock: int
    digest: int


def payload_digest(payload: memoryview) -> int:
    """xxh3-64 of a payload. The GIL is free while hashing."""
    hasher = xxhash.xxh3_64()
    hasher.update(payload)
    return hasher.intdigest()


def _page(fields: bytes) -> bytes:
    body = fields.ljust(PAGE - _DIGEST.size, b"\0")
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def _is_whole(page: memoryview) -> bool:
    body = page[: -_DIGEST.size]
    return bool(_DIGEST.unpack(page[-_DIGEST.size :])[0] == xxhash.xxh3_64_intdigest(body))


def pack_segment(page: SegmentPage) -> bytes:
    """A segment's first page."""
    text = page.identity.encode()
    geometry = page.geometry
    head = _SEGMENT.pack(_SEGMENT_MAGIC, page.version, page.number, geometry.block_bytes, geometry.num_slots, len(text))
    return _page(head + text)


def parse_segment(page: memoryview) -> SegmentPage | None:
    """Reads a segment's first page; None when it is damaged or none."""
    if len(page) != PAGE or not _is_whole(page):
        return None
    magic, version, number, block_bytes, num_slots, length = _SEGMENT.unpack_from(page)
    if magic != _SEGMENT_MAGIC:
        return None
    text = bytes(page[_SEGMENT.size : _SEGMENT.size + length])
    geometry = Geometry(block_bytes=block_bytes, num_slots=num_slots)
    return SegmentPage(number=number, geometry=geometry, identity=text.decode(errors="replace"), version=version)


def pack_block(block: BlockPage, place: Place, num_bytes: int) -> bytes:
    """The page of a slot that holds `num_bytes` of a block."""
    tenant = block.tenant.encode()
    parent = block.parent or bytes(HASH_BYTES)
    ids = (block.sequence, block.clock, num_bytes, block.name, parent)
    fields = (_BLOCK_MAGIC, place.segment, place.slot, block.parent is not None, *ids, block.digest, len(tenant))
    return _page(_BLOCK.pack(*fields) + tenant)


def pack_dead(place: Place) -> bytes:
    """The page of a slot whose block is gone."""
    return _page(_DEAD.pack(_DEAD_MAGIC, place.segment, place.slot))


def parse_block(page: memoryview, place: Place, num_bytes: int) -> BlockPage | SlotState:
    """Reads a slot's page. One that belongs to another slot or length is damaged."""
    if page == _EMPTY:
        return SlotState.EMPTY
    if not _is_whole(page):
        return SlotState.DAMAGED
    if _DEAD.unpack_from(page) == (_DEAD_MAGIC, place.segment, place.slot):
        return SlotState.DEAD
    magic, segment, slot, has_parent, sequence, clock, length, name, parent, digest, tenant_bytes = _BLOCK.unpack_from(
        page
    )
    if (magic, segment, slot, length) != (_BLOCK_MAGIC, place.segment, place.slot, num_bytes):
        return SlotState.DAMAGED
    return BlockPage(
        name=BlockHash(name),
        parent=BlockHash(parent) if has_parent else None,
        tenant=bytes(page[_BLOCK.size : _BLOCK.size + tenant_bytes]).decode(),
        sequence=sequence,
        clock=clock,
        digest=digest,
    )
