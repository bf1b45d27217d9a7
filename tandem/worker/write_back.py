"""Tells what a worker's device tier holds, and copies it to the node's store, away from the engine's critical path.

The engine's thread only says that something changed. Names that came are written through, or, with "on_eviction", when
they are about to make room for others; a bounded number waits, the rest is left out and counted. A block that is being
copied is held, so that nobody writes to it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tandem.kv.block_copies import BlockCopies
from tandem.kv.prefix_pool import NamedPrefix, PrefixPool
from tandem.kv.tiering import WritePolicy
from tandem.prefix_store.announce import Announcer
from tandem.prefix_store.client import StoreClient
from tandem.prefix_store.holdings import Grant
from tandem.prefix_store.slab import block_digest
from tandem.rpc.tandem.v1 import inference_pb2
from tandem.tasks import cancel_all
from tandem.types import BlockHash

logger = logging.getLogger(__name__)

_CLEARED_AT_ONCE = 256
"""Names that are forgotten while the engine waits: a millisecond or two."""
_EVICTING_AHEAD = 32
"""Blocks written before they are evicted, where that is when they are written."""


@dataclass(kw_only=True, slots=True)
class Written:
    """What became of the names that came, since the start. A block that the store had already counts as nothing."""

    num_blocks: int = 0
    num_dropped: int = 0
    """Left out because too many waited."""
    num_refused: int = 0
    """The store had no room, or was away."""
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteBackSettings:
    """`max_waiting`: names that wait to be written."""

    policy: WritePolicy = "through"
    max_waiting: int = 4096


@dataclass(kw_only=True, slots=True)
class WriteBack:
    """Event loop only, but for `changed`. `lock` guards `pool`; `on_released`: held blocks are free again."""

    pool: PrefixPool
    lock: threading.Condition
    copies: BlockCopies
    on_released: Callable[[], None]
    client: StoreClient | None = None
    announcer: Announcer | None = None
    settings: WriteBackSettings = field(default_factory=WriteBackSettings)
    written: Written = field(default_factory=Written)
    _waiting: dict[BlockHash, None] = field(default_factory=dict)
    _seen: set[BlockHash] = field(default_factory=set)
    """Names here that need not be looked at again."""
    _event: asyncio.Event = field(default_factory=asyncio.Event)
    _is_told: bool = False
    _loop: asyncio.AbstractEventLoop | None = None
    _task: asyncio.Task[None] | None = None
    _thread: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Works from now on."""
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-back")
        self._task = asyncio.create_task(self._run())
        if self.client is not None:
            self.client.on_attached = self._write_anew

    async def close(self) -> None:
        """Ends what is under way. Idempotent."""
        if self._task is not None:
            await cancel_all([self._task])
        if self._thread is not None:
            self._thread.shutdown()

    def changed(self) -> None:
        """The pool's names may have changed. Any thread; returns at once."""
        if self._loop is not None and not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._event.set)

    async def clear(self) -> int:
        """Forgets the names that nobody uses; how many. A part at a time: the engine waits for none of it long."""
        num_cleared, num_now = 0, _CLEARED_AT_ONCE
        while num_now == _CLEARED_AT_ONCE:
            with self.lock:
                num_now = self.pool.clear(limit=_CLEARED_AT_ONCE)
            num_cleared += num_now
            self.changed()
            await asyncio.sleep(0)
        return num_cleared

    def tier(self) -> inference_pb2.DeviceTier:
        """What is cached here, and what was copied. The caller holds the lock."""
        written = self.written
        return inference_pb2.DeviceTier(
            num_named_blocks=self.pool.num_named,
            num_cached_blocks=self.pool.num_cached,
            num_evictions=self.pool.num_evicted,
            num_written_blocks=written.num_blocks,
            num_written_bytes=written.num_bytes,
            num_dropped_blocks=written.num_dropped,
            num_refused_blocks=written.num_refused,
            write_s=written.seconds,
        )

    def _write_anew(self) -> None:
        """The store may have nothing of what is here."""
        self._seen.clear()
        if self.settings.policy == "through":
            with self.lock:
                self._want(self.pool.names())
        self.changed()

    @property
    def is_idle(self) -> bool:
        """Whether everything was told and written."""
        return not self._is_told and not self._waiting

    async def _run(self) -> None:
        while True:
            await self._event.wait()
            self._event.clear()
            self._is_told = False
            self._look()
            while self._waiting:
                await self._write_one()
                self._look()

    def _look(self) -> None:
        """Takes what changed, and decides what is to be written."""
        with self.lock:
            changes = self.pool.take_changes()
            ahead = self._next_to_go() if self.settings.policy == "on_eviction" else ()
        if self.announcer is not None and (changes.added or changes.removed):
            self.announcer.changed("device", changes.added, changes.removed)
        if self.client is None:
            return
        for name in changes.removed:
            self._waiting.pop(name, None)
            self._seen.discard(name)
        self._want(changes.added if self.settings.policy == "through" else ahead)

    def _want(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            if name in self._seen:
                continue
            self._seen.add(name)
            if len(self._waiting) < self.settings.max_waiting:
                self._waiting[name] = None
            else:
                self.written.num_dropped += 1

    def _next_to_go(self) -> tuple[BlockHash, ...]:
        """What should be written now, because there will soon be no room: nothing while blocks are free."""
        num_unused = self.pool.num_free - self.pool.num_cached
        return () if num_unused >= _EVICTING_AHEAD else self.pool.next_to_go(_EVICTING_AHEAD)

    async def _write_one(self) -> None:
        """The prefix of the name that came last, and with it the names before it in the same prefix."""
        name = next(reversed(self._waiting))
        del self._waiting[name]
        with self.lock:
            if name not in self.pool:
                return
            prefix = self.pool.prefix_of(name)
            self.pool.share(prefix.blocks)
        try:
            await self._write(prefix)
        except Exception:  # a fault of ours costs this prefix its place in the store, and no other
            logger.exception("a prefix of %d blocks could not be written to the store", len(prefix.names))
            self.written.num_refused += 1
        finally:
            with self.lock:
                self.pool.release(prefix.blocks)
            self.on_released()
        for earlier in prefix.names:
            self._waiting.pop(earlier, None)
            self._seen.add(earlier)

    async def _write(self, prefix: NamedPrefix) -> None:
        assert self.client is not None
        assert self._thread is not None
        assert self._loop is not None
        grant = await self.client.put(prefix.names, tenant=prefix.tenant)
        if not grant.slots:
            return
        copying = self._loop.run_in_executor(self._thread, self._copy, grant, prefix)
        try:
            digests = await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait({copying})  # the slots are the store's again only when nobody writes them
            grant.cancel()
            raise
        except Exception:
            grant.cancel()
            raise
        num_committed = await grant.commit(digests)
        self.written.num_blocks += num_committed
        self.written.num_refused += len(grant.slots) - num_committed
        self.written.num_bytes += num_committed * grant.memory.shape[1]

    def _copy(self, grant: Grant, prefix: NamedPrefix) -> list[int]:
        """The write-back's own thread."""
        started_s = time.monotonic()
        blocks = prefix.blocks[grant.first : grant.first + len(grant.slots)]
        self.copies.store(grant.memory, slots=grant.slots, blocks=blocks)
        digests = [block_digest(grant.block(index)) for index in range(len(grant.slots))]
        self.written.seconds += time.monotonic() - started_s
        return digests
