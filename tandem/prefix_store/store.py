"""One node's prefix store: finds blocks in its tiers, brings them into the host tier, lends and takes them. Event loop.

Decides nothing itself: what makes room is the directory's, what goes to disk `kv/tiering.py`'s, how far to load the
worker's that asks. Copies and checksums run on threads of its own; nothing here blocks the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kv.tiering import Tier
from tandem.prefix_store.blocks import Evicted, Held, Reservation
from tandem.prefix_store.loading import Loader
from tandem.prefix_store.parts import StoreParts
from tandem.prefix_store.slab import block_digest
from tandem.prefix_store.writing import WriteDown
from tandem.types import BlockHash


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """Leading blocks that can be had, cumulative: from the host tier, with the disk, with peers. Speeds in bytes/s."""

    num_host: int
    num_disk: int
    num_remote: int
    disk_bytes_per_s: float = 0.0
    remote_bytes_per_s: float = 0.0


class NodeStore:
    """Over `parts`, which it does not own but for the order in which `close` ends them."""

    def __init__(self, parts: StoreParts) -> None:
        self.settings = parts.settings
        self.host = parts.host
        self.disk = parts.disk
        self._parts = parts
        self.metrics = parts.metrics
        self._writer = WriteDown(parts, parts.disk) if parts.disk is not None else None
        self._loader = Loader(parts, self._make_room)
        self._disk_pins: Counter[BlockHash] = Counter()

    def lookup(self, names: Sequence[BlockHash]) -> Lookup:
        """Changes nothing."""
        num_host = self.host.match(names)
        num_disk, num_remote = self._loader.matches(names)
        num_disk = max(num_host, num_disk)
        disk, remote = self._loader.speed(Tier.DISK), self._loader.speed(Tier.REMOTE)
        return Lookup(
            num_host=num_host,
            num_disk=num_disk,
            num_remote=max(num_disk, num_remote),
            disk_bytes_per_s=disk.bytes_per_s if disk is not None else 0.0,
            remote_bytes_per_s=remote.bytes_per_s if remote is not None else 0.0,
        )

    # --- lending

    async def acquire(self, names: Sequence[BlockHash], *, tenant: str, timeout_s: float) -> tuple[Held, ...]:
        """Leading blocks in the host tier, kept until `give_back`; loads what is missing for as long as `timeout_s`."""
        started_s = time.monotonic()
        held = list(self.host.borrow(names))
        num_used = self.host.use(names)
        self.metrics.hits.labels(tier="host").inc(num_used)
        self.metrics.misses.labels(tier="host").inc(len(names) - num_used)
        self.metrics.read_bytes.labels(tier="host").inc(num_used * self.settings.block_bytes)
        try:
            await self._extend(held, names, tenant, deadline_s=started_s + timeout_s)
            if self.settings.check == "read":
                await self._drop_damaged(held)
        except BaseException:
            self.host.give_back(held)
            raise
        self.metrics.acquire_seconds.observe(time.monotonic() - started_s)
        return tuple(held)

    async def _extend(self, held: list[Held], names: Sequence[BlockHash], tenant: str, *, deadline_s: float) -> None:
        while len(held) < len(names):
            load = self._loader.start(names, tenant)
            if load is None:
                return
            await asyncio.wait({load}, timeout=max(0.0, deadline_s - time.monotonic()))
            more = [self.host.borrow_one(name) for name in names[len(held) : self.host.match(names)]]
            held += [one for one in more if one is not None]
            if not more:
                return

    async def _drop_damaged(self, held: list[Held]) -> None:
        """Cuts `held` before the first block whose bytes are not what they were, and removes that."""
        num_good = await self._num_good([one.slot for one in held], [one.digest for one in held])
        if num_good < len(held):
            self._remove_damaged(held[num_good].name)
            self.host.give_back(held[num_good:])
            del held[num_good:]

    def give_back(self, held: Sequence[Held]) -> None:
        """Ends a loan."""
        self.host.give_back(held)

    # --- taking

    async def reserve(self, names: Sequence[BlockHash], *, first: int, tenant: str) -> Reservation | None:
        """Slots for the missing ones of `names[first:]`; nobody reads them when this returns. None: no room or need."""
        num_present = self.host.present(names)
        reservation = self.host.reserve(names, first=first, tenant=tenant)
        num_granted = len(reservation.slots) if reservation is not None else 0
        self.metrics.refused.inc(len(names) - max(first, num_present) - num_granted)
        if reservation is not None:
            try:
                await self._make_room(reservation.evicted)
            except BaseException:
                self.host.cancel(reservation)
                raise
        return reservation

    async def commit(self, reservation: Reservation, digests: Sequence[int], *, tenant: str) -> int:
        """Makes the leading blocks visible that have their digest; how many. The others' slots are free again."""
        num_good = min(len(digests), len(reservation.slots))
        try:
            if self.settings.check == "commit":
                slots = reservation.slots[:num_good]
                num_good = await self._num_good(slots, digests)
                if num_good < len(slots):
                    self.metrics.damaged.labels(tier="host").inc()
        except BaseException:
            self.host.cancel(reservation)
            raise
        num_committed = self.host.commit(reservation, digests[:num_good])
        self.metrics.written_bytes.labels(tier="host").inc(num_committed * self.settings.block_bytes)
        if num_committed and self._writer is not None:
            chain = self.host.chain(reservation.names[num_committed - 1])
            self._writer.committed(chain, tenant)
        return num_committed

    def cancel(self, reservation: Reservation) -> None:
        """Gives all slots back; nothing writes them any more."""
        self.host.cancel(reservation)

    async def _make_room(self, evicted: Sequence[Evicted]) -> None:
        if self._writer is not None and evicted:
            await self._writer.evicted(evicted)

    # --- checksums

    async def _num_good(self, slots: Sequence[int], digests: Sequence[int]) -> int:
        """Leading slots whose bytes have their digest."""

        def count() -> int:
            for index, (slot, digest) in enumerate(zip(slots, digests, strict=False)):
                if block_digest(self.host.slab.bytes_of(slot)) != digest:
                    return index
            return min(len(slots), len(digests))

        return await asyncio.get_running_loop().run_in_executor(self._parts.pool, count)

    def _remove_damaged(self, name: BlockHash) -> None:
        self.metrics.damaged.labels(tier="host").inc()
        self.host.remove([name])

    async def verify(self) -> tuple[int, int]:
        """Reads the host tier again, then the disk's: blocks checked, and damaged ones, which are removed."""
        num_checked = num_damaged = 0
        for name in self.host.visible():
            held = self.host.borrow_one(name)
            if held is None:
                continue
            try:
                good = await self._num_good([held.slot], [held.digest])
            finally:
                self.host.give_back([held])
            num_checked += 1
            if not good:
                num_damaged += 1
                self._remove_damaged(name)
        if self.disk is not None:
            counts = await asyncio.wrap_future(self.disk.verify())
            self.metrics.damaged.labels(tier="disk").inc(counts.damaged)
            num_checked, num_damaged = num_checked + counts.checked, num_damaged + counts.damaged
        return num_checked, num_damaged

    # --- people

    def chain(self, name: BlockHash) -> Sequence[BlockHash]:
        """The prefix that a block of this node ends, first to last; empty when it is in no tier here."""
        chain = self.host.chain(name)
        return chain if chain or self.disk is None else self.disk.chain(name)

    def pin(self, names: Sequence[BlockHash]) -> int:
        """Keeps what there is of a prefix, where it is; how many blocks."""
        num_pinned = self.host.pin(names)
        num_disk = self.disk.match(names) if self.disk is not None else 0
        for name in names[:num_disk]:
            assert self.disk is not None
            self.disk.pin(name)
            self._disk_pins[name] += 1
        return max(num_pinned, num_disk)

    def unpin(self, names: Sequence[BlockHash]) -> int:
        """Takes one pin of each block away; how many had one."""
        on_disk = [name for name in names if self._disk_pins[name]]
        for name in on_disk:
            assert self.disk is not None
            self.disk.unpin(name)
            self._disk_pins[name] -= 1
        self._disk_pins += Counter()  # drops zeros
        return max(self.host.unpin(names), len(on_disk))

    @property
    def num_pinned_on_disk(self) -> int:
        """Blocks that people pinned there."""
        return len(self._disk_pins)

    async def clear(self) -> int:
        """Forgets all that is not pinned; how many blocks that were, in both tiers."""
        before = self._present()
        self.host.clear()
        if self.disk is not None and self._disk_pins:
            self.disk.remove([name for name in self.disk.names() if name not in self._disk_pins])
        elif self.disk is not None:
            await asyncio.wrap_future(self.disk.clear())
        return len(before - self._present())

    def _present(self) -> set[BlockHash]:
        """What can be found on this node."""
        return {*self.host.visible(), *(self.disk.names() if self.disk is not None else ())}

    async def close(self) -> None:
        """Waits for loads and writes under way; the tiers are closed by whoever made them."""
        await self._loader.drain()
        if self._writer is not None:
            await self._writer.drain()
