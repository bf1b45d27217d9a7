"""Brings blocks from disk and from other nodes into the host tier, each at most once at a time. Event loop; bounded.

A load is a task of its own: whoever waits for it may give up, the load goes on and its blocks stay for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from tandem.kv.tiering import Tier, TierGauge, TierSpeed
from tandem.prefix_store.blocks import Evicted, Reservation
from tandem.prefix_store.parts import StoreParts
from tandem.prefix_store.slab import block_digest
from tandem.types import BlockHash

logger = logging.getLogger(__name__)

MakeRoom = Callable[[Sequence[Evicted]], Awaitable[None]]
"""Sees to blocks that made room; when it returns, their slots may be written."""


class Loader:
    """Loads from the tiers below the host's."""

    def __init__(self, parts: StoreParts, make_room: MakeRoom) -> None:
        self._host = parts.host
        self._settings = parts.settings
        self._disk = parts.disk
        self._remote = parts.remote
        self._make_room = make_room
        self._pool = parts.pool
        self._metrics = parts.metrics
        self._loads: dict[BlockHash, asyncio.Task[None]] = {}
        self._gauges = {Tier.DISK: TierGauge(), Tier.REMOTE: TierGauge()}

    def matches(self, names: Sequence[BlockHash]) -> tuple[int, int]:
        """Leading blocks on disk, and at the best peer."""
        num_disk = self._disk.match(names) if self._disk is not None else 0
        return num_disk, self._remote.match(names) if self._remote is not None else 0

    def speed(self, tier: Tier) -> TierSpeed | None:
        """What was measured of it lately."""
        return self._gauges[tier].speed(time.monotonic())

    def start(self, names: Sequence[BlockHash], tenant: str) -> asyncio.Task[None] | None:
        """The load that will bring the first missing block, begun if needed. None when nothing can bring it."""
        num_host = self._host.match(names)
        if num_host == len(names):
            return None
        known = self._loads.get(names[num_host])
        if known is not None:
            return known
        num_disk, num_remote = self.matches(names)
        self._count_misses(len(names), num_disk, num_remote)
        if max(num_disk, num_remote) <= num_host or len(self._loads) >= self._settings.max_loads:
            return None
        tier, count = (Tier.DISK, num_disk) if num_disk > num_host else (Tier.REMOTE, num_remote)
        reservation = self._host.reserve(names[:count], first=num_host, tenant=tenant)
        if reservation is None:
            return None
        task = asyncio.ensure_future(self._load(tier, names, reservation))
        self._loads[names[num_host]] = task
        task.add_done_callback(lambda _: self._loads.pop(names[num_host]))
        return task

    def _count_misses(self, num_names: int, num_disk: int, num_remote: int) -> None:
        if self._disk is not None:
            self._metrics.misses.labels(tier="disk").inc(num_names - num_disk)
        if self._remote is not None:
            self._metrics.misses.labels(tier="remote").inc(max(0, num_names - max(num_disk, num_remote)))

    async def _load(self, tier: Tier, names: Sequence[BlockHash], reservation: Reservation) -> None:
        digests: list[int] = []
        try:
            await self._make_room(reservation.evicted)
            started_s = time.monotonic()
            load = self._from_disk if tier is Tier.DISK else self._from_remote
            digests = await load(names, reservation)
            elapsed_s = time.monotonic() - started_s
            self._metrics.load_seconds[tier].observe(elapsed_s)
            num_bytes = len(digests) * self._settings.block_bytes
            self._gauges[tier].observe(num_bytes, elapsed_s, time.monotonic())
            self._metrics.hits.labels(tier=tier).inc(len(digests))
            self._metrics.read_bytes.labels(tier=tier).inc(num_bytes)
        except Exception:  # a tier's own trouble is a miss
            logger.exception("a load from the %s tier failed", tier)
        finally:
            self._host.commit(reservation, digests)

    async def _from_disk(self, names: Sequence[BlockHash], reservation: Reservation) -> list[int]:
        assert self._disk is not None
        self._disk.use(names)
        slots = [self._host.slab.bytes_of(slot) for slot in reservation.slots]
        num_read = await asyncio.wrap_future(self._disk.read(reservation.names, [slot.data for slot in slots]))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: [block_digest(slot) for slot in slots[:num_read]])

    async def _from_remote(self, names: Sequence[BlockHash], reservation: Reservation) -> list[int]:
        assert self._remote is not None
        end = reservation.first + len(reservation.slots)
        destinations = [self._host.slab.tensor_of(slot) for slot in reservation.slots]
        fetched = await self._remote.fetch(
            names[:end],
            first=reservation.first,
            destinations=destinations,
            timeout_s=self._settings.fetch_timeout_s,
        )
        self._metrics.damaged.labels(tier="remote").inc(fetched.num_damaged)
        return fetched.digests

    async def drain(self) -> None:
        """Returns when nothing is being loaded."""
        while self._loads:
            await asyncio.wait(set(self._loads.values()))
