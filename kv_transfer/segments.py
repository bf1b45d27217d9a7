"""Byte runs on both sides of a copy: checks, views, and one walk over two differently cut lists of segments."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tandem.errors import TransportError
from tandem.kv.payload_digest import LANED_BYTES, PayloadHasher
from tandem.model.native import Kernels, kernels

Bytes: TypeAlias = npt.NDArray[np.uint8]

HOST = torch.device("cpu")

NATIVE_BYTES = LANED_BYTES
"""What is smaller is not worth describing to the kernel."""
_COPY_BYTES = 512 << 10
"""Copied and digested at a time: small enough to be digested out of the cache that the copy filled."""


def as_bytes(segments: Sequence[torch.Tensor], num_bytes: int) -> list[Bytes]:
    """`segments` as numpy views, empty ones left out.

    Raises TransportError unless all are contiguous 1-D uint8 tensors in host memory of `num_bytes` bytes together.
    """
    check_segments(segments, num_bytes, HOST)
    return [segment.numpy() for segment in segments if segment.numel()]  # uint8: none requires a gradient


def check_segments(segments: Sequence[torch.Tensor], num_bytes: int, device: torch.device) -> None:
    """Raises TransportError unless all are contiguous 1-D uint8 on `device` and have `num_bytes` bytes together."""
    total = 0
    for segment in segments:
        if segment.dtype != torch.uint8 or segment.dim() != 1 or not segment.is_contiguous():
            raise TransportError(
                f"a segment must be contiguous 1-D uint8, got {segment.dtype} {tuple(segment.shape)}", param="segments"
            )
        if segment.device != device:
            raise TransportError(f"a segment must lie on {device}, got {segment.device}", param="segments")
        total += segment.numel()
    if total != num_bytes:
        raise TransportError(f"segments have {total} bytes, the header says {num_bytes}", param="segments")


def walk(
    targets: Sequence[Bytes], sources: Sequence[Bytes], longest: int = _COPY_BYTES
) -> Iterator[tuple[Bytes, Bytes]]:
    """Pairs of equally long pieces that, copied in order, fill `targets` from `sources` (equal totals)."""
    remaining = iter(sources)
    source = next(remaining, None)
    for target in targets:
        while target.nbytes:
            assert source is not None, "sources are shorter than targets"
            size = min(target.nbytes, source.nbytes, longest)
            yield target[:size], source[:size]
            target = target[size:]
            source = source[size:] if size < source.nbytes else next(remaining, None)


def copy(targets: Sequence[Bytes], sources: Sequence[Bytes], *, with_digest: bool) -> int:
    """Copies with the GIL free; returns the digest of what now lies in `targets`, or 0 when not asked for one.

    From NATIVE_BYTES on, our own kernel reads memory once for both; without it, the digest takes a pass of its own.
    """
    total = sum(target.nbytes for target in targets)
    if total >= NATIVE_BYTES and (native := kernels()) is not None:
        return _moved(native, list(walk(targets, sources, sys.maxsize)), with_digest=with_digest)
    if not with_digest:
        for target, source in walk(targets, sources, sys.maxsize):
            np.copyto(target, source)
        return 0
    hasher = PayloadHasher(total)
    for target, source in walk(targets, sources):
        np.copyto(target, source)
        hasher.update(target.data)
    return hasher.digest()


def _moved(native: Kernels, pairs: Sequence[tuple[Bytes, Bytes]], *, with_digest: bool) -> int:
    places = [(address_of(target), address_of(source), target.nbytes) for target, source in pairs]
    return _run(native, places, with_digest=with_digest)


def _run(native: Kernels, places: Sequence[tuple[int, int, int]], *, with_digest: bool) -> int:
    """`places` are target or 0, source, bytes."""
    pieces = np.array(places, dtype=np.int64)
    found = native.move(address_of(pieces), len(places), with_digest)
    return (found or 1) if with_digest else 0


def address_of(array: npt.NDArray[Any]) -> int:
    """Where it begins in memory."""
    return int(array.__array_interface__["data"][0])


def digest_bytes(views: Sequence[Bytes]) -> int:
    """Like `kv_transfer.digest.digest`, of numpy views."""
    return digest_at([(address_of(view), view.nbytes) for view in views])


def digest_at(places: Sequence[tuple[int, int]]) -> int:
    """The digest of what lies at addresses in host memory (and how many bytes), which the caller keeps alive."""
    total = sum(num_bytes for _, num_bytes in places)
    if total >= NATIVE_BYTES and (native := kernels()) is not None:
        return _run(native, [(0, address, num_bytes) for address, num_bytes in places], with_digest=True)
    hasher = PayloadHasher(total)
    for address, num_bytes in places:
        hasher.update(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)))
    return hasher.digest()


def check_digest(expected: int, actual: int) -> TransportError | None:
    """The error to report when both are known and differ."""
    if expected and expected != actual:
        return TransportError(f"payload digest is {actual:016x}, the header says {expected:016x}")
    return None
