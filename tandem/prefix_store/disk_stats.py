"""What a disk tier says about itself and about what it did not do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NotStored(StrEnum):
    """Why blocks of a put are not on disk."""

    QUEUE_FULL = "queue_full"
    NO_ROOM = "no_room"
    """Everything that is there is pinned, or the tenant has its quota in use."""
    DISK_FULL = "disk_full"
    IO_ERROR = "io_error"
    CLEARED = "cleared"
    """The tier was cleared, or the prefix's beginning removed, while the put waited."""
    CLOSED = "closed"


class Stored(int):
    """How many leading blocks of a put are on disk in the end; `why` says what kept the others off, if any."""

    why: NotStored | None

    def __new__(cls, count: int, why: NotStored | None = None) -> Stored:
        """A count with its reason."""
        stored = super().__new__(cls, count)
        stored.why = why
        return stored


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCounts:
    """What a look at every block found. `removed` counts the damaged ones and what was only reached through them."""

    checked: int
    damaged: int
    removed: int


@dataclass(slots=True)
class Counters:
    """What has happened since the tier was opened. Its owner changes it under a lock."""

    blocks_read: int = 0
    blocks_written: int = 0
    blocks_copied: int = 0
    """By collection, beside `blocks_written`."""
    bytes_read: int = 0
    bytes_written: int = 0
    """Payloads and their pages, copies too."""
    read_s: float = 0.0
    """Threads' time in reads, checks included."""
    write_s: float = 0.0
    evictions: int = 0
    segments_collected: int = 0
    checksum_failures: int = 0
    read_errors: int = 0
    write_errors: int = 0
    refused: int = 0
    """Puts for which the queue had no room."""
    not_stored: int = 0
    """Blocks of accepted puts that did not reach the disk."""
    recovered: int = 0
    """Blocks that were there when the tier was opened."""
    recovery_damaged: int = 0
    """Slots and segments that were no good then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskStats:
    """A tier at one moment: what it holds, what waits, and its counters so far."""

    blocks: int
    max_blocks: int
    segments: int
    file_bytes: int
    """All segments, garbage and pages included."""
    live_bytes: int
    queued_blocks: int
    reads_in_flight: int
    direct: bool
    """Whether the page cache is bypassed."""
    counters: Counters
