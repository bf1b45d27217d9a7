"""Small disk tiers for tests: names that make chains, payloads that follow from names, and files that misbehave."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.prefix_store.disk import DiskTier, DiskTuning
from tandem.prefix_store.disk_files import Files, aligned_memory
from tandem.prefix_store.disk_format import PAGE, Geometry
from tandem.types import BlockHash

SLOTS = 8
"""Slots of a segment, unless a test says otherwise."""


def chain(text: str) -> list[BlockHash]:
    """Names of the blocks of a text, a letter each: texts that begin alike share blocks."""
    return [BlockHash(hashlib.blake2b(text[:end].encode(), digest_size=16).digest()) for end in range(1, len(text) + 1)]


def payload(name: BlockHash, num_bytes: int = PAGE) -> memoryview:
    """The bytes of a block, in aligned memory."""
    memory = aligned_memory(num_bytes)
    memory[:] = hashlib.shake_128(name).digest(num_bytes)
    return memory


def payloads(names: Sequence[BlockHash], num_bytes: int = PAGE) -> list[memoryview]:
    return [payload(name, num_bytes) for name in names]


def segment_bytes(num_slots: int = SLOTS, block_bytes: int = PAGE) -> int:
    return Geometry(block_bytes=block_bytes, num_slots=num_slots).file_bytes


def make_tier(directory: Path, *, num_segments: int = 16, block_bytes: int = PAGE, **changes: Any) -> DiskTier:
    """A tier of `num_segments` segments of 8 blocks."""
    num_bytes = changes.pop("segment_bytes", segment_bytes(block_bytes=block_bytes))
    tuning = changes.pop("tuning", {})
    values: dict[str, Any] = {
        "block_bytes": block_bytes,
        "capacity_bytes": num_segments * num_bytes,
        "identity": "model",
        "tuning": DiskTuning(segment_bytes=num_bytes, **tuning),
    }
    return DiskTier(directory, **{**values, **changes})


@contextmanager
def open_tier(directory: Path, **changes: Any) -> Iterator[DiskTier]:
    """A tier that is sound when the block ends, and is closed."""
    tier = make_tier(directory, **changes)
    try:
        yield tier
        tier.check_invariants()
    finally:
        tier.close()


def store(tier: DiskTier, *texts: str, block_bytes: int = PAGE, tenant: str = "") -> list[int]:
    """Puts the blocks of texts, one text after another; what each put says."""
    return [tier.put(names, payloads(names, block_bytes), tenant=tenant).result(30) for names in map(chain, texts)]


def fetch(tier: DiskTier, names: Sequence[BlockHash], block_bytes: int = PAGE) -> int:
    """Reads blocks; how many leading ones there were. Fails when one of these is not what it was."""
    memory = [aligned_memory(block_bytes) for _ in names]
    count = tier.read(names, memory).result(30)
    for name, got in zip(names[:count], memory, strict=False):
        assert got == payload(name, block_bytes), "wrong bytes"
    return count


def survivors(tier: DiskTier) -> set[BlockHash]:
    """Every block that a tier has, each of them read and compared; those that turn out bad are not among them."""
    return {name for name in tier.names() if fetch(tier, [name]) == 1}


class FaultyFiles(Files):
    """Real files whose calls can be made to fail, to fall short or to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.read_error: int | None = None
        self.bad_offsets: frozenset[int] = frozenset()
        """Reads that touch these offsets end with EIO."""
        self.write_error: int | None = None
        self.longest_write: int | None = None
        """No write says that it wrote more than this."""
        self.longest_read: int | None = None
        self.may_write = threading.Event()
        self.may_write.set()
        self.may_read = threading.Event()
        self.may_read.set()

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.may_read.wait(30)
        end = offset + sum(view.nbytes for view in views)
        code = errno.EIO if any(offset <= bad < end for bad in self.bad_offsets) else self.read_error
        if code is not None:
            raise OSError(code, os.strerror(code))
        count = super().preadv(fd, views, offset)
        return count if self.longest_read is None else min(count, self.longest_read)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.may_write.wait(30)
        if self.write_error is not None:
            raise OSError(self.write_error, os.strerror(self.write_error))
        count = super().pwritev(fd, views, offset)
        return count if self.longest_write is None else min(count, self.longest_write)
