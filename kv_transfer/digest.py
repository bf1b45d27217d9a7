"""The digest of a payload (`tandem.kv.payload_digest` says what it is), and which payloads have one.

Every payload in host memory has one. From a GPU the bytes would have to be brought to the host first: a sample has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kv_transfer.segments import digest_at

DEVICE_SAMPLE = 16
"""Of the payloads on a GPU, one in this many is digested unless the configuration says otherwise."""


def digest(segments: Sequence[torch.Tensor]) -> int:
    """Of the bytes of `segments` (1-D uint8, contiguous), one after another. Zero-copy in host memory; never 0.

    The GIL is free while hashing.
    """
    here = _on_host(segments)
    return digest_at([(segment.data_ptr(), segment.numel()) for segment in here])


def _on_host(segments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Joined on their device and brought over in one copy, which is waited for; on the host, as they are."""
    if all(segment.device.type == "cpu" for segment in segments):
        return segments
    return [torch.cat(list(segments)).cpu()]


class DigestPolicy:
    """Which payloads get a digest: one in `every`; 0 takes all in host memory and one in DEVICE_SAMPLE on a GPU."""

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._count = itertools.count()

    def digest(self, segments: Sequence[torch.Tensor]) -> int:
        """The digest, or 0 for none. Any thread."""
        on_host = all(segment.device.type == "cpu" for segment in segments)
        every = self._every or (1 if on_host else DEVICE_SAMPLE)
        return digest(segments) if next(self._count) % every == 0 else 0
