"""A fast fingerprint of weight files: their sizes, their headers, and both ends of every tensor. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

_SAMPLE_BYTES = 2048


class Span(NamedTuple):
    """A range of a file, in bytes."""

    start: int
    num_bytes: int

    @staticmethod
    def ends_of(start: int, num_bytes: int) -> tuple[Span, Span]:
        """The first and the last part of a tensor; all of it when it is small."""
        size = min(_SAMPLE_BYTES, (num_bytes + 1) // 2)
        return Span(start, size), Span(start + num_bytes - size, size)


def sampled_digest(files: Iterable[tuple[memoryview, list[Span]]], *, extra: bytes = b"") -> str:
    """32 hex digits over the given spans of each file, the files' sizes, and `extra`."""
    digest = hashlib.blake2b(digest_size=16, person=b"tandem-weights")
    for data, spans in files:
        digest.update(len(data).to_bytes(8, "little"))
        for start, num_bytes in spans:
            digest.update(data[start : start + num_bytes])
    digest.update(extra)
    return digest.hexdigest()
