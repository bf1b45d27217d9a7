"""How fast the disk tier reads and writes, beside fio on the same file system in the same run.

    python -m benchmarks.disk_tier [--quick] [--directory DIR] [--json FILE]

Blocks are those of the default model (720 KiB in fp32). The tier reads prefixes of 64 blocks in random order, several
at a time; fio (libaio) reads a file of the same size at random offsets, in pieces as long as the tier's and as many at
a time. Both bypass the page cache, on files that are fully written. The two take turns; the ratio is the median of the
rounds' own. The tier's figure includes its checksums. Needs fio (`apt install fio`) and a file system that takes direct
IO; without them there is no ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.report import finish
from tandem.kv.eviction import Lru
from tandem.prefix_store.disk import DiskTier, DiskTuning
from tandem.prefix_store.disk_files import aligned_memory
from tandem.types import BlockHash

BLOCK_BYTES = 720 << 10
PREFIX_BLOCKS = 64
MIB = 1 << 20
TUNING = DiskTuning(segment_bytes=512 * MIB)
PIECE_BYTES = TUNING.read_bytes // BLOCK_BYTES * BLOCK_BYTES
READS_AT_ONCE = 3
"""Prefixes that are asked for at the same time: more pieces than the queue is deep."""


def names_of(prefix: int) -> list[BlockHash]:
    """The blocks of one prefix."""
    return [BlockHash(prefix.to_bytes(8, "little") + block.to_bytes(8, "little")) for block in range(PREFIX_BLOCKS)]


def fill(tier: DiskTier, num_prefixes: int) -> float:
    """Stores prefixes; GB/s."""
    memory = aligned_memory(PREFIX_BLOCKS * BLOCK_BYTES)
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, memory.nbytes, np.uint8)
    payloads = [memory[block * BLOCK_BYTES :][:BLOCK_BYTES] for block in range(PREFIX_BLOCKS)]
    began = time.perf_counter()
    for done in [tier.put(names_of(prefix), payloads) for prefix in range(num_prefixes)]:
        if done.result() != PREFIX_BLOCKS:
            raise SystemExit(f"a prefix was not stored whole: {done.result()!r}")
    return num_prefixes * memory.nbytes / (time.perf_counter() - began) / 1e9


def read_all(tier: DiskTier, num_prefixes: int, seed: int) -> float:
    """Reads every prefix once, in random order; GB/s."""
    buffers = [aligned_memory(PREFIX_BLOCKS * BLOCK_BYTES) for _ in range(READS_AT_ONCE)]
    order = list(range(num_prefixes))
    random.Random(seed).shuffle(order)
    free, running = deque(buffers), deque[tuple[Future[int], memoryview]]()
    began = time.perf_counter()
    while order or running:
        while order and free:
            memory = free.popleft()
            views = [memory[block * BLOCK_BYTES :][:BLOCK_BYTES] for block in range(PREFIX_BLOCKS)]
            running.append((tier.read(names_of(order.pop()), views), memory))
        done, memory = running.popleft()
        if done.result() != PREFIX_BLOCKS:
            raise SystemExit(f"a prefix was not read whole: {done.result()}")
        free.append(memory)
    return num_prefixes * PREFIX_BLOCKS * BLOCK_BYTES / (time.perf_counter() - began) / 1e9


def fio(path: Path, num_bytes: int, direction: str) -> float:
    """GB/s of fio over a file of `num_bytes`, each piece of it once; `direction` is fio's word for it."""
    command = [
        *("fio", "--name=disk", f"--filename={path}", f"--size={num_bytes}", f"--rw={direction}", "--direct=1"),
        *(f"--bs={PIECE_BYTES}", f"--iodepth={TUNING.queue_depth}", "--ioengine=libaio", "--output-format=json"),
        *("--fallocate=posix", "--refill_buffers=0", "--thread", "--norandommap=0"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    report = json.loads(done.stdout[done.stdout.index("{") :])
    side = "read" if "read" in direction else "write"
    return float(report["jobs"][0][side]["bw_bytes"]) / 1e9


def measure(quick: bool, directory: Path | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """Figures and ratios; these are missing, and `fio_missing` is 1, where fio or direct IO is."""
    num_prefixes = 24 if quick else 72
    num_rounds = 3 if quick else 5
    num_bytes = num_prefixes * PREFIX_BLOCKS * BLOCK_BYTES
    tuning = DiskTuning(segment_bytes=TUNING.segment_bytes, queue_blocks=num_prefixes * PREFIX_BLOCKS)
    place = Path(tempfile.mkdtemp(prefix="tandem-disk-", dir=directory))
    try:
        tier = DiskTier(
            place / "tier",
            block_bytes=BLOCK_BYTES,
            capacity_bytes=num_bytes * 5 // 4 + 2 * TUNING.segment_bytes,
            policy=Lru(),
            tuning=tuning,
        )
        try:
            return _compare(tier, place / "fio", num_prefixes, num_rounds)
        finally:
            tier.close()
    finally:
        shutil.rmtree(place)


def _compare(
    tier: DiskTier, path: Path, num_prefixes: int, num_rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    num_bytes = num_prefixes * PREFIX_BLOCKS * BLOCK_BYTES
    num_bytes -= num_bytes % PIECE_BYTES
    figures = {"disk_write_gbps": fill(tier, num_prefixes), "disk_direct_io": float(tier.stats().direct)}
    has_fio = shutil.which("fio") is not None and tier.stats().direct
    if has_fio:
        figures["fio_write_gbps"] = fio(path, num_bytes, "write")
    ours, theirs = [], []
    for seed in range(num_rounds):
        ours.append(read_all(tier, num_prefixes, seed))
        if has_fio:
            theirs.append(fio(path, num_bytes, "randread"))
    figures["disk_read_gbps"] = median(ours)
    if not has_fio:
        print("no fio (apt install fio) or no direct IO here: nothing to compare reads with", file=sys.stderr)
        return figures | {"fio_missing": 1.0}, {}
    figures["fio_read_gbps"] = median(theirs)
    ratios = {
        "disk_read_vs_fio": median(our / their for our, their in zip(ours, theirs, strict=True)),
        "disk_write_vs_fio": figures["disk_write_gbps"] / figures["fio_write_gbps"],
    }
    return figures, ratios


def main() -> None:
    """Prints figures and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the bytes, three rounds")
    parser.add_argument("--directory", type=Path, help="a directory on the file system to measure (default: temporary)")
    parser.add_argument("--json", type=Path, help="write figures and ratios to this file")
    arguments = parser.parse_args()
    figures, ratios = measure(arguments.quick, arguments.directory)
    finish(figures, ratios, arguments.json, "Disk tier")


if __name__ == "__main__":
    main()
