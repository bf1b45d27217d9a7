"""Block names as they travel: one after another, 16 bytes each."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.errors import InvalidRequest
from tandem.kv.hashing import HASH_BYTES
from tandem.types import BlockHash


def pack_names(names: Iterable[BlockHash]) -> bytes:
    """Inverse of `unpack_names`."""
    return b"".join(names)


def unpack_names(data: bytes) -> list[BlockHash]:
    """Raises InvalidRequest when it is not whole names."""
    if len(data) % HASH_BYTES:
        raise InvalidRequest(f"names have {HASH_BYTES} bytes each, got {len(data)} bytes", param="names")
    return [BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES)]
