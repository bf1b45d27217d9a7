"""Host blocks on their way to disk: when they are committed, or when they make room. Event loop; bounded.

Blocks that stay are written from where they lie and kept there meanwhile; those that make room are copied out first. A
prefix goes down in pieces, first blocks first, so that what is cut off at any moment is its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.kv.tiering import writes_down
from tandem.prefix_store.blocks import Evicted
from tandem.prefix_store.parts import StoreParts
from tandem.prefix_store.slab import Bytes
from tandem.prefix_store.tier import DiskStore
from tandem.types import BlockHash

logger = logging.getLogger(__name__)

_PIECE_BLOCKS = 64
"""Blocks that are handed to the disk tier together, and kept in the host tier until they are written."""
_WRITERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A prefix that is to be on disk; `copies` are its blocks that the host tier has no more."""

    chain: Sequence[BlockHash]
    tenant: str
    num_new: int
    copies: Mapping[BlockHash, Bytes] = field(default_factory=dict)


class WriteDown:
    """What waits is bounded; beyond that blocks are skipped, which costs a later hit and no time."""

    def __init__(self, parts: StoreParts, disk: DiskStore) -> None:
        self._host = parts.host
        self._disk = disk
        self._policy = parts.settings.write_policy
        self._max_blocks = parts.settings.max_writing_blocks
        self._max_copies = parts.settings.max_copied_blocks
        self._pool = parts.pool
        self._metrics = parts.metrics
        self._jobs: deque[_Job] = deque()
        self._num_waiting = 0
        self._num_copies = 0
        self._writers: set[asyncio.Task[None]] = set()

    def committed(self, chain: Sequence[BlockHash], tenant: str) -> None:
        """Blocks of this prefix, to its end, have become visible."""
        num_new = len(chain) - self._disk.match(chain)
        if writes_down(self._policy, evicted=False, on_disk=not num_new):
            self._add(_Job(chain=chain, tenant=tenant, num_new=num_new))

    async def evicted(self, blocks: Sequence[Evicted]) -> None:
        """These made room; when this returns, their slots may be written."""
        tips = [block for block in blocks if block.chain]
        lacking = [(tip, tip.chain[self._disk.match(tip.chain) :]) for tip in tips]
        wanted = [(tip, names) for tip, names in lacking if writes_down(self._policy, evicted=True, on_disk=not names)]
        names = {name for _, names in wanted for name in names}
        leaving = [block for block in blocks if block.name in names]
        if self._num_copies + len(leaving) > self._max_copies:
            self._metrics.skipped.inc(len(leaving))
        elif leaving:
            self._num_copies += len(leaving)
            try:
                copies = await asyncio.get_running_loop().run_in_executor(self._pool, self._copy_out, leaving)
            except BaseException:
                self._num_copies -= len(leaving)
                raise
            self._add_each(wanted, copies)

    def _copy_out(self, blocks: Sequence[Evicted]) -> dict[BlockHash, Bytes]:
        return {block.name: self._host.slab.bytes_of(block.slot).copy() for block in blocks}

    def _add_each(self, wanted: Sequence[tuple[Evicted, Sequence[BlockHash]]], copies: dict[BlockHash, Bytes]) -> None:
        """A job for each tip; a block that several need goes with the first, which writes it."""
        for tip, names in wanted:
            own = {name: copies.pop(name) for name in names if name in copies}
            self._add(_Job(chain=tip.chain, tenant=tip.tenant, num_new=len(names), copies=own))

    def _add(self, job: _Job) -> None:
        if self._num_waiting + job.num_new > self._max_blocks:
            self._skip(job, job.num_new)
            return
        self._num_waiting += job.num_new
        self._jobs.append(job)
        if len(self._writers) < _WRITERS:
            writer = asyncio.ensure_future(self._write_all())
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)

    def _skip(self, job: _Job, num_blocks: int) -> None:
        self._num_copies -= len(job.copies)
        self._metrics.skipped.inc(num_blocks)

    async def _write_all(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            before = self._disk.match(job.chain)
            try:
                while await self._write_piece(job):
                    pass
            except Exception:  # the disk tier's own trouble: blocks are not stored, serving goes on
                logger.exception("%d blocks were not written to disk", job.num_new)
            self._num_waiting -= job.num_new
            num_there = self._disk.match(job.chain)
            self._skip(job, len(job.chain) - num_there)
            num_bytes = max(0, num_there - before) * self._host.slab.block_bytes
            self._metrics.written_bytes.labels(tier="disk").inc(num_bytes)

    async def _write_piece(self, job: _Job) -> bool:
        """The next blocks that the disk lacks; whether it took any."""
        start = self._disk.match(job.chain)
        names = job.chain[: start + _PIECE_BLOCKS]
        held = self._host.borrow(names)
        views = [self._host.slab.bytes_of(one.slot).data for one in held]
        views += [job.copies[name].data for name in names[len(held) :] if name in job.copies]
        try:
            if start == len(job.chain) or len(views) < len(names):
                return False
            await asyncio.wrap_future(self._disk.put(names, views, tenant=job.tenant))
        finally:
            views.clear()
            self._host.give_back(held)
        return self._disk.match(job.chain) > start

    async def drain(self) -> None:
        """Returns when nothing is on its way to disk."""
        while self._writers:
            await asyncio.wait(self._writers)
