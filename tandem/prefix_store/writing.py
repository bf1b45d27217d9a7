"""Host blocks on their way to disk: when they are committed, or when they make room. Event loop; bounded.

Blocks that stay are written from where they lie and kept there meanwhile; those that make room are copied out first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from tandem.kv.tiering import writes_down
from tandem.prefix_store.blocks import Evicted, Held
from tandem.prefix_store.parts import StoreParts
from tandem.prefix_store.slab import Bytes
from tandem.prefix_store.tier import DiskStore
from tandem.types import BlockHash

logger = logging.getLogger(__name__)


class WriteDown:
    """What is on its way is bounded; beyond that blocks are skipped, which costs a later hit and no time."""

    def __init__(self, parts: StoreParts, disk: DiskStore) -> None:
        self._host = parts.host
        self._disk = disk
        self._policy = parts.settings.write_policy
        self._max_blocks = parts.settings.max_writing_blocks
        self._pool = parts.pool
        self._metrics = parts.metrics
        self._num_blocks = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def committed(self, chain: Sequence[BlockHash], tenant: str) -> None:
        """Blocks of this prefix, to its end, have become visible."""
        if writes_down(self._policy, evicted=False, on_disk=self._is_there(chain)):
            self._start(chain, {}, tenant)

    async def evicted(self, blocks: Sequence[Evicted]) -> None:
        """These made room; when this returns, their slots may be written."""
        wanted = [b for b in blocks if writes_down(self._policy, evicted=True, on_disk=self._is_there(b.chain))]
        if self._num_blocks + len(wanted) > self._max_blocks:
            self._metrics.skipped.inc(len(wanted))
            return
        if wanted:
            copies = await asyncio.get_running_loop().run_in_executor(self._pool, self._copy_out, wanted)
            inner = {block.chain[-2] for block in wanted if len(block.chain) > 1}
            for block in wanted:
                if block.name not in inner:
                    self._start(block.chain, copies, block.tenant)

    def _is_there(self, chain: Sequence[BlockHash]) -> bool:
        return self._disk.match(chain) == len(chain)

    def _copy_out(self, blocks: Sequence[Evicted]) -> dict[BlockHash, Bytes]:
        return {block.name: self._host.slab.bytes_of(block.slot).copy() for block in blocks}

    def _start(self, chain: Sequence[BlockHash], copies: Mapping[BlockHash, Bytes], tenant: str) -> None:
        held = self._host.borrow(chain)
        views = [self._host.slab.bytes_of(one.slot).data for one in held]
        views += [copies[name].data for name in chain[len(held) :] if name in copies]
        num_new = len(chain) - self._disk.match(chain)
        if len(views) < len(chain) or self._num_blocks + num_new > self._max_blocks:
            self._host.give_back(held)
            self._metrics.skipped.inc(num_new)
            return
        self._num_blocks += num_new
        task = asyncio.ensure_future(self._write(chain, views, held, num_new=num_new, tenant=tenant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(
        self, chain: Sequence[BlockHash], views: list[memoryview], held: Sequence[Held], *, num_new: int, tenant: str
    ) -> None:
        before = self._disk.match(chain)
        try:
            await asyncio.wrap_future(self._disk.put(chain, views, tenant=tenant))
        except Exception:  # the disk tier's own trouble: blocks are not stored, serving goes on
            logger.exception("%d blocks were not written to disk", num_new)
        finally:
            views.clear()
            self._host.give_back(held)
            self._num_blocks -= num_new
            num_stored = max(0, self._disk.match(chain) - before)
            self._metrics.written_bytes.labels(tier="disk").inc(num_stored * self._host.slab.block_bytes)

    async def drain(self) -> None:
        """Returns when nothing is on its way to disk."""
        while self._tasks:
            await asyncio.wait(self._tasks)
