"""The disk tier of a prefix store: KV blocks of one size by name, in checksummed segments that outlive the process.

`DiskTier` is the door. `PrefixDirectory` decides what stays, `SegmentLog` where it lies; one thread writes, several
read, and no call waits for the disk. A block is here once it is whole on disk; one whose bytes are not what was put is
a miss and goes. What was evicted is marked on disk too, so that a restart finds what was there, not what had gone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigError, StoreError
from tandem.kv.eviction import EvictionPolicy, Lrfu
from tandem.kv.hashing import HASH_BYTES
from tandem.kv.prefix_directory import PrefixDirectory, SavedBlock
from tandem.kv.segment_log import SegmentLog
from tandem.prefix_store.disk_files import Files
from tandem.prefix_store.disk_format import MAX_TEXT_BYTES, PAGE, Geometry, fit
from tandem.prefix_store.disk_lock import DirectoryLock
from tandem.prefix_store.disk_reader import DiskReader
from tandem.prefix_store.disk_records import Site
from tandem.prefix_store.disk_recovery import Recovered, recover
from tandem.prefix_store.disk_state import DiskState, Names, OnChange, ignore
from tandem.prefix_store.disk_stats import DiskStats, VerifyCounts
from tandem.prefix_store.disk_uses import Uses, load_uses, save_uses
from tandem.prefix_store.disk_writer import Clear, DiskWriter, Put
from tandem.types import BlockHash

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_NUM_SEGMENTS = 128
_BATCH_BYTES = 16 * _MIB
"""What is written, or copied by a collection, in one piece."""
_MAX_PIECE = 256
"""Blocks in one piece: fewer than the operating system takes buffers in one call."""
_MAX_LOST_SHARE = 32
"""A batch is at most one in so many blocks of the tier: a crash may bring back as many that had gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskTuning:
    """What suits the device."""

    segment_bytes: int = 0
    """Bytes of a segment; 0 takes what makes 128 of them, but at least 16 MiB and four blocks. The more segments, the
    less a collection copies; each keeps a file open."""
    queue_depth: int = 8
    """Pieces that are read at the same time."""
    read_bytes: int = 4 * _MIB
    """Longest piece."""
    queue_blocks: int = 512
    """Blocks of puts that may wait; further puts are refused."""

    def __post_init__(self) -> None:
        bounds = {"segment_bytes": 0, "queue_depth": 1, "read_bytes": PAGE, "queue_blocks": 1}
        for name, least in bounds.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be {least} or more, got {getattr(self, name)}", param=name)


class DiskTier:
    """Blocks of `block_bytes` each in `directory`, which is this tier's alone and made when it is missing.

    Any thread may call anything. Names are 16 bytes. Buffers at multiples of 4096 with such sizes are read into and
    written from without a copy; others work too.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        block_bytes: int,
        capacity_bytes: int,
        identity: str = "",
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, int] | None = None,
        tenant_share: float = 1.0,
        on_change: OnChange = ignore,
        tuning: DiskTuning | None = None,
        files: Files | None = None,
    ) -> None:
        """Opens the directory and finds what it holds; `names()` says what that is, `on_change` only what follows.

        `identity` names what the blocks are KV of. `capacity_bytes` bounds the segments' files, garbage included;
        seven eighths of all but one of them can be live. `quotas` are in blocks, by tenant;
        `tenant_share` of all is any other tenant's.
        Raises DirectoryInUse, ForeignDirectory (another identity or size), StoreError (it cannot be used at all),
        ConfigError (the capacity is too small).
        """
        self._block_bytes = block_bytes
        self._directory = Path(directory)
        self._files = files or Files()
        self._tuning = tuning or DiskTuning()
        geometry = self._geometry(capacity_bytes)
        log = SegmentLog(capacity_bytes, geometry.file_bytes, geometry.num_slots)
        if log.max_live < 1:
            raise ConfigError(
                f"capacity_bytes must hold three segments of {geometry.file_bytes} bytes, got {capacity_bytes}",
                param="capacity_bytes",
            )
        if len(identity.encode()) > MAX_TEXT_BYTES:
            raise ConfigError(f"identity must have {MAX_TEXT_BYTES} bytes or fewer", param="identity")
        names = PrefixDirectory(log.max_live, policy or Lrfu(), quotas=dict(quotas or {}), tenant_share=tenant_share)
        self._state = DiskState(names, log)
        self._site = Site(directory=self._directory, identity=identity, geometry=geometry, files=self._files)
        self._closed = False
        try:
            self._open(on_change)
        except OSError as exc:
            raise StoreError(f"{self._directory} cannot be used: {exc}") from exc

    def _geometry(self, capacity_bytes: int) -> Geometry:
        smallest = Geometry(block_bytes=self._block_bytes, num_slots=1).file_bytes
        wanted = max(16 * _MIB, capacity_bytes // _NUM_SEGMENTS, 4 * smallest)
        segment_bytes = self._tuning.segment_bytes or min(wanted, capacity_bytes // 8)
        return fit(self._block_bytes, max(segment_bytes, smallest))

    def _open(self, on_change: OnChange) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(self._directory)
        try:
            self._files.probe(self._directory)
            stride, max_live = self._site.geometry.stride, self._state.log.max_live
            batch = max(1, min(max_live // _MAX_LOST_SHARE, _BATCH_BYTES // stride, _MAX_PIECE))
            sequence = self._recover(recover(self._site, batch))
            longest = max(1, min(self._tuning.read_bytes // stride, _MAX_PIECE))
            self._reader = DiskReader(self._files, self._state, queue_depth=self._tuning.queue_depth, longest=longest)
            self._writer = DiskWriter(
                self._site,
                self._state,
                max_batch=batch,
                queue_blocks=self._tuning.queue_blocks,
                sequence=sequence,
            )
            self._writer.collector.settle_in()
            self._state.on_change = on_change  # from here on: what was found is in `names()`
            self._writer.start()
        except BaseException:
            self._release()
            raise

    def _recover(self, found: Recovered) -> int:
        """Puts back what was found; the highest sequence number there is."""
        state, directory = self._state, self._state.directory
        uses = load_uses(self._uses_path, self._scale)
        saved = [
            SavedBlock(
                name=page.name,
                parent=page.parent,
                tenant=page.tenant,
                clock=page.clock,
                priority=uses.priorities.get(page.name),
            )
            for page, _ in found.blocks.values()
        ]
        directory.restore(saved, clock=max((uses.clock, *(block.clock for block in saved))))
        for file, next_slot in found.segments:
            geometry = file.geometry
            state.files[file.number] = file
            state.log.add(file.number, num_slots=geometry.num_slots, num_bytes=geometry.file_bytes, next_slot=next_slot)
        for page, place in found.blocks.values():
            if page.name in directory:
                state.log.settle(page.name, place)
                state.digests[page.name] = page.digest
            else:
                state.bury([place])
        state.bury(found.superseded)
        state.counters.recovered = len(directory)
        state.counters.recovery_damaged = found.num_damaged
        return max((page.sequence for page, _ in found.blocks.values()), default=0)

    @property
    def _scale(self) -> str:
        """What priorities depend on besides uses."""
        return f"{self._state.directory.capacity} {self._state.directory.policy!r}"

    @property
    def _uses_path(self) -> Path:
        return self._directory / "uses"

    def names(self) -> Names:
        """Every block that is here, parents first."""
        with self._state.lock:
            return self._state.directory.names()

    def __contains__(self, name: BlockHash) -> bool:
        return self.contains(name)

    def contains(self, name: BlockHash) -> bool:
        """Whether a block is here."""
        with self._state.lock:
            return name in self._state.directory

    def match(self, names: Sequence[BlockHash]) -> int:
        """How many leading blocks are here."""
        with self._state.lock:
            return self._state.directory.match(names)

    def chain(self, name: BlockHash) -> Names:
        """The prefix that a block ends, first to last; empty when it is not here."""
        with self._state.lock:
            return self._state.directory.path(name) if name in self._state.directory else ()

    def use(self, names: Sequence[BlockHash]) -> int:
        """Like `match`, and counts as a use of the blocks that were hit."""
        with self._state.lock:
            return self._state.directory.use(names)

    def put(self, names: Sequence[BlockHash], payloads: Sequence[memoryview], *, tenant: str = "") -> Future[int]:
        """Stores what is missing of a prefix, given from its first block on, each with its payload.

        The future has a `Stored`: how many leading blocks are here in the end, and why not all. Payloads must stay as
        they are until then. Raises ValueError for names, payloads or a tenant of the wrong length.
        """
        views = self._checked(names, payloads)
        if len(tenant.encode()) > MAX_TEXT_BYTES:
            raise ValueError(f"a tenant has {MAX_TEXT_BYTES} bytes or fewer")
        job = Put(names=tuple(names), payloads=views, tenant=tenant, generation=self._state.generation)
        self._writer.put(job)
        return job.done

    def read(self, names: Sequence[BlockHash], destinations: Sequence[memoryview]) -> Future[int]:
        """Reads the leading blocks of a prefix that are here into as many of `destinations`.

        The future has how many of them, from the first on, are whole; what later destinations hold is undefined.
        Destinations are the tier's until then.
        """
        views = self._checked(names, destinations)
        if any(view.readonly for view in views):
            raise ValueError("destinations must be writable")
        return self._reader.read(names, views)

    def _checked(self, names: Sequence[BlockHash], buffers: Sequence[memoryview]) -> tuple[memoryview, ...]:
        views = tuple(buffer.cast("B") for buffer in buffers)
        if len(names) != len(views) or any(len(name) != HASH_BYTES for name in names):
            raise ValueError(f"{len(names)} names of {HASH_BYTES} bytes do not go with {len(views)} buffers")
        if any(view.nbytes != self._block_bytes for view in views):
            raise ValueError(f"a block has {self._block_bytes} bytes")
        return views

    def pin(self, name: BlockHash) -> bool:
        """Keeps a block, and its prefix, from eviction until as many unpins. False: it is not here."""
        with self._state.lock:
            present = name in self._state.directory
            if present:
                self._state.directory.pin(name)
            return present

    def unpin(self, name: BlockHash) -> None:
        """Takes one pin away; nothing when the block has gone with its pins."""
        with self._state.lock:
            if self._state.directory.num_pins(name):
                self._state.directory.unpin(name)

    def remove(self, names: Sequence[BlockHash]) -> Names:
        """Removes blocks, pinned or not, with all that is only reached through them; what went, at once.

        The disk is told soon after; a crash in between may bring them back.
        """
        return self._state.remove(names)

    def clear(self) -> Future[int]:
        """Removes everything at once; the future has how much that was when its files are deleted."""
        job = Clear(count=0 if self._closed else self._state.clear())
        self._writer.clear(job)
        return job.done

    def verify(self) -> Future[VerifyCounts]:
        """Reads everything again and removes what is damaged, in the background, one block at a time."""
        return self._reader.verify()

    def stats(self) -> DiskStats:
        """What is here and what has happened."""
        with self._state.lock:
            log = self._state.log
            return DiskStats(
                blocks=len(self._state.directory),
                max_blocks=self._state.directory.capacity,
                segments=len(log.segments),
                file_bytes=log.used_bytes,
                live_bytes=len(self._state.directory) * self._block_bytes,
                queued_blocks=self._writer.queued_blocks,
                reads_in_flight=self._state.num_reads,
                direct=self._files.direct,
                counters=copy(self._state.counters),
            )

    def check_invariants(self) -> None:
        """Asserts that everything that is known agrees. Only while nothing is being stored."""
        self._state.check_invariants()

    def close(self) -> None:
        """Waits for what is being read and for the batch that is being written; puts that wait are not stored.

        Idempotent. Later puts store nothing and later reads read nothing.
        """
        with self._state.lock:
            if self._closed:
                return
            self._closed = True
        self._writer.close()
        self._reader.close()
        self._save_uses()
        self._release()

    def _release(self) -> None:
        for file in self._state.files.values():
            file.release()
        self._lock.release()

    def _save_uses(self) -> None:
        with self._state.lock:
            directory = self._state.directory
            uses = Uses(clock=directory.clock, scale=self._scale, priorities=directory.priorities())
        try:
            save_uses(self._uses_path, uses)
        except OSError as exc:
            logger.warning("the use of blocks was not saved: %s", exc)
