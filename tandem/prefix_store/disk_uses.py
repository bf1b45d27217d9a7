"""Keeps what a disk tier knows of the use of its blocks over a restart, so that it goes on evicting the right ones.

Written when a tier is closed. It is a hint: without it, blocks count as used once, when they were stored.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from sys import byteorder

import xxhash

from tandem.kv.hashing import HASH_BYTES
from tandem.types import BlockHash

_MAGIC = b"KVuses01"
_HEADER = struct.Struct("<8sQQQ")
_DIGEST = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses:
    """Priorities at a time of the directory's clock; `scale` is all that they depend on besides uses."""

    clock: int = 0
    scale: str = ""
    priorities: Mapping[BlockHash, float] = field(default_factory=dict)


def _number(scale: str) -> int:
    return xxhash.xxh3_64_intdigest(scale.encode())


def save_uses(path: Path, uses: Uses) -> None:
    """Replaces the file at once or not at all. Raises OSError."""
    values = array("d", uses.priorities.values())
    if byteorder == "big":
        values.byteswap()
    header = _HEADER.pack(_MAGIC, uses.clock, _number(uses.scale), len(values))
    body = b"".join((header, *uses.priorities, values.tobytes()))
    new = path.with_suffix(".new")
    new.write_bytes(body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body)))
    os.replace(new, path)


def load_uses(path: Path, scale: str) -> Uses:
    """What was saved at the same scale; nothing when there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Uses()
    body = data[: -_DIGEST.size]
    if len(data) < _HEADER.size + _DIGEST.size or data[-_DIGEST.size :] != _DIGEST.pack(xxhash.xxh3_64_intdigest(body)):
        return Uses()
    magic, clock, number, count = _HEADER.unpack_from(body)
    if magic != _MAGIC or number != _number(scale):
        return Uses()
    end = _HEADER.size + count * HASH_BYTES
    values = array("d", body[end:])
    if byteorder == "big":
        values.byteswap()
    names = (BlockHash(body[at : at + HASH_BYTES]) for at in range(_HEADER.size, end, HASH_BYTES))
    return Uses(clock=clock, scale=scale, priorities=dict(zip(names, values, strict=True)))
