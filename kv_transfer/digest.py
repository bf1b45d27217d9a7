"""The digest of a payload: xxh3-64 over its bytes in order, wherever they lie. Detects damage, not malice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

_STEP_BYTES = 1 << 20


def digest(segments: Sequence[torch.Tensor]) -> int:
    """xxh3-64 of the bytes of `segments` (1-D uint8, host memory), one after another. Zero-copy; never 0.

    0 in a header means "not digested", so a payload that hashes to 0 gets 1. The GIL is free while hashing.
    """
    hasher = xxhash.xxh3_64()
    for segment in segments:
        view = segment.detach().numpy().data
        for start in range(0, len(view), _STEP_BYTES):
            hasher.update(view[start : start + _STEP_BYTES])
    return finish(hasher)


def finish(hasher: xxhash.xxh3_64) -> int:
    """The digest of what was fed to `hasher`."""
    return hasher.intdigest() or 1
