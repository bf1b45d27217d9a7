"""A payload's digest is one function for everybody: whatever computes it, however the bytes are cut."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from kv_transfer.segments import digest_bytes
from tandem.kv.payload_digest import LANED_BYTES, PayloadHasher
from tandem.model.native import kernels

VECTORS = {
    0: 0x2D06800538D394C2,
    1: 0xC44BDFF4074EECDB,
    240: 0xB714C5FD22744964,
    65_535: 0xE3C08168A3A059A2,
    65_536: 0xAB62625A37A13034,
    65_791: 0x1A4B8CC21608D8EC,
    200_001: 0xECDD06DCA8EFCE21,
    2_236_416: 0xED8C230E927DEF44,
}
"""Digests of `payload` by its length."""


def payload(num_bytes: int) -> np.ndarray:
    numbers = np.arange(num_bytes, dtype=np.uint64) * np.uint64(2_654_435_761)
    return (numbers >> np.uint64(13)).astype(np.uint8)


def isa() -> str:
    native = kernels()
    return "torch" if native is None else native.ISA


def hashed(view: np.ndarray, step: int) -> int:
    hasher = PayloadHasher(view.nbytes)
    for start in range(0, view.nbytes, step):
        hasher.update(view[start : start + step].data)
    return hasher.digest()


@pytest.mark.parametrize("step", [1_000_003, 65_536, 4_999])
def test_the_function_never_changes(step: int) -> None:
    assert {size: hashed(payload(size), step) for size in VECTORS} == VECTORS


@pytest.mark.parametrize("instructions", ["", "avx2", "base"])
def test_the_kernels_of_every_instruction_set_have_it(instructions: str) -> None:
    environment = {**os.environ, "TANDEM_KERNELS": instructions} if instructions else dict(os.environ)
    code = "from tests.tandem.kv.test_payload_digest import *; "
    code += "print([digest_bytes([payload(n)]) for n in VECTORS], isa())"
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    digests, used = found.stdout.strip().rsplit(" ", 1)
    assert digests == str(list(VECTORS.values()))
    if used != "torch":
        assert used in {"": ("avx512", "avx2", "base"), "avx2": ("avx2", "base"), "base": ("base",)}[instructions]


def test_a_short_payload_has_plain_xxh3_and_a_long_one_that_of_its_quarters() -> None:
    short, long = payload(LANED_BYTES - 1), payload(LANED_BYTES)
    assert hashed(short, 1 << 20) == xxhash.xxh3_64_intdigest(short.data)
    quarters = [xxhash.xxh3_64_intdigest(quarter.data).to_bytes(8, "little") for quarter in np.split(long, 4)]
    assert hashed(long, 1 << 20) == xxhash.xxh3_64_intdigest(b"".join(quarters))


def test_quarters_that_changed_places_have_another_digest() -> None:
    quarters = np.split(payload(LANED_BYTES), 4)
    expected = digest_bytes(quarters)
    for one in range(4):
        for other in range(one):
            changed = list(quarters)
            changed[one], changed[other] = changed[other], changed[one]
            assert digest_bytes(changed) != expected
