"""The host tier: which slot holds which block, who reads it, and who is writing it. Moves no bytes.

    free ── reserve ──> reserved ── commit ──> visible ── evicted, removed ──> free
                            └── cancel ──> free    └── while it is read: lingering ──> free

Reserved blocks are in the directory, pinned, so that their prefix stays, but nobody finds them. A slot stays with its
reservation until that is committed or cancelled, whatever became of the block: nobody else's block is ever put where
somebody may still write. Event loop only.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.kv.eviction import EvictionPolicy
from tandem.kv.prefix_directory import PrefixDirectory
from tandem.prefix_store.blocks import Evicted, Held, HostBlock, Reservation
from tandem.prefix_store.slab import SlabView
from tandem.types import BlockHash

OnChange = Callable[[Sequence[BlockHash], Sequence[BlockHash]], None]
"""Told which names became visible and which are gone."""


@dataclass(slots=True)
class _Entry:
    name: BlockHash
    slot: int
    tenant: str
    parent: BlockHash | None
    depth: int
    reservation: int
    """0 when visible."""
    digest: int = 0
    num_uses: int = 0
    num_pins: int = 0
    """By people, not by readers."""


class HostTier:
    """`slab.num_slots` blocks; `quotas` are blocks a tenant may hold, `tenant_share` what any other one may."""

    def __init__(
        self,
        slab: SlabView,
        *,
        policy: EvictionPolicy,
        quotas: Mapping[str, int] | None = None,
        tenant_share: float = 1.0,
        on_change: OnChange = lambda added, removed: None,
    ) -> None:
        self.slab = slab
        self.num_evictions = 0
        self._on_change = on_change
        self._directory = PrefixDirectory(slab.num_slots, policy, quotas=dict(quotas or {}), tenant_share=tenant_share)
        self._entries: dict[BlockHash, _Entry] = {}
        self._by_slot: dict[int, _Entry] = {}
        self._readers: dict[int, int] = {}
        self._free: deque[int] = deque(range(slab.num_slots))
        self._reservations: dict[int, Reservation] = {}
        self._last_number = 0

    def __len__(self) -> int:
        """Visible blocks."""
        return len(self._by_slot)

    @property
    def num_reserved(self) -> int:
        """Slots that are being written, or may be."""
        return sum(len(reservation.slots) for reservation in self._reservations.values())

    @property
    def num_read(self) -> int:
        """Slots that have readers."""
        return len(self._readers)

    @property
    def num_pinned(self) -> int:
        """Blocks that people pinned."""
        return sum(1 for entry in self._entries.values() if entry.num_pins)

    def match(self, names: Sequence[BlockHash]) -> int:
        """How many leading names are visible."""
        for index, name in enumerate(names):
            entry = self._entries.get(name)
            if entry is None or entry.reservation:
                return index
        return len(names)

    def present(self, names: Sequence[BlockHash]) -> int:
        """How many leading names are visible or being written."""
        return self._directory.match(names)

    def use(self, names: Sequence[BlockHash]) -> int:
        """Like `match`, and counts as a use of what was hit."""
        num_hit = self.match(names)
        for name in names[:num_hit]:
            self._entries[name].num_uses += 1
        return self._directory.use(names[:num_hit])

    # --- readers

    def borrow(self, names: Sequence[BlockHash]) -> tuple[Held, ...]:
        """Keeps the leading visible ones until they are given back."""
        return tuple(self._hold(self._entries[name]) for name in names[: self.match(names)])

    def borrow_one(self, name: BlockHash) -> Held | None:
        """Keeps a visible block, whatever its prefix."""
        entry = self._entries.get(name)
        return None if entry is None or entry.reservation else self._hold(entry)

    def _hold(self, entry: _Entry) -> Held:
        self._readers[entry.slot] = self._readers.get(entry.slot, 0) + 1
        self._directory.pin(entry.name)
        generation = int(self.slab.generations[entry.slot])
        return Held(name=entry.name, slot=entry.slot, generation=generation, digest=entry.digest)

    def give_back(self, held: Sequence[Held]) -> None:
        """Ends a `borrow`, or part of one."""
        for one in held:
            self._readers[one.slot] -= 1
            entry = self._by_slot.get(one.slot)
            if entry is not None:
                self._directory.unpin(entry.name)
            if not self._readers[one.slot]:
                del self._readers[one.slot]
                if entry is None:
                    self._free.append(one.slot)

    # --- writers

    def reserve(self, names: Sequence[BlockHash], *, first: int, tenant: str = "") -> Reservation | None:
        """Slots for those of `names[first:]` that are missing, as far as room can be made from the front.

        None when there is nothing to write, no room, or a hole before `first`.
        """
        if self._directory.match(names) < first:
            return None
        admission = self._directory.insert(names, tenant=tenant)
        evicted = self._evict(admission.evicted)
        admitted = admission.admitted[: len(self._free)]
        for name in reversed(admission.admitted[len(self._free) :]):
            self._directory.remove(name)
        if not admitted:
            return None
        self._last_number += 1
        start = names.index(admitted[0])
        slots = tuple(self._assign(names, start + index, tenant) for index in range(len(admitted)))
        reservation = Reservation(number=self._last_number, first=start, names=admitted, slots=slots, evicted=evicted)
        self._reservations[reservation.number] = reservation
        return reservation

    def commit(self, reservation: Reservation, digests: Sequence[int]) -> int:
        """Makes the leading blocks visible, one for each digest, and ends the reservation. How many are visible."""
        added = []
        for name, slot, digest in zip(reservation.names, reservation.slots, digests, strict=False):
            entry = self._pending(reservation, name)
            if entry is None:
                break  # removed meanwhile; what follows it is, too
            entry.reservation, entry.digest = 0, digest
            self._by_slot[slot] = entry
            self._directory.unpin(name)
            added.append(name)
        self._end(reservation)
        if added:
            self._on_change(added, ())
        return len(added)

    def cancel(self, reservation: Reservation) -> None:
        """Ends a reservation; nothing writes its slots any more. Idempotent."""
        self._end(reservation)

    def _end(self, reservation: Reservation) -> None:
        if self._reservations.pop(reservation.number, None) is None:
            return
        for name, slot in zip(reversed(reservation.names), reversed(reservation.slots), strict=True):
            if self._pending(reservation, name) is not None:
                self._forget(self._directory.remove(name))
            if slot not in self._by_slot:
                self._free.append(slot)

    def _pending(self, reservation: Reservation, name: BlockHash) -> _Entry | None:
        entry = self._entries.get(name)
        return entry if entry is not None and entry.reservation == reservation.number else None

    def _assign(self, names: Sequence[BlockHash], index: int, tenant: str) -> int:
        name, slot = names[index], self._free.popleft()
        self.slab.generations[slot] += 1
        parent = names[index - 1] if index else None
        self._entries[name] = _Entry(name, slot, tenant, parent, index, self._last_number)
        self._directory.pin(name)
        return slot

    # --- ends of blocks

    def remove(self, names: Sequence[BlockHash]) -> int:
        """Forgets blocks and all that is only reached through them; how many. Readers keep their slots."""
        return sum(self._forget(self._directory.remove(name)) for name in names)

    def clear(self) -> int:
        """Forgets all blocks but pinned ones and their prefixes; how many."""
        kept: set[BlockHash] = set()
        for entry in self._entries.values():
            kept |= set(self._chain(entry)) if entry.num_pins else set()
        doomed = sorted((e for e in self._entries.values() if e.name not in kept), key=lambda e: -e.depth)
        return self.remove([entry.name for entry in doomed])

    def _evict(self, names: Sequence[BlockHash]) -> tuple[Evicted, ...]:
        found = [self._entries[name] for name in names]
        inner = {entry.parent for entry in found}
        evicted = tuple(
            Evicted(
                name=entry.name,
                slot=entry.slot,
                tenant=entry.tenant,
                chain=() if entry.name in inner else self._chain(entry),
            )
            for entry in found
        )
        self._forget(names)
        self.num_evictions += len(evicted)
        return evicted

    def _forget(self, names: Sequence[BlockHash]) -> int:
        """Their slots are free, unless somebody reads or writes them."""
        gone = []
        for name in names:
            entry = self._entries.pop(name)
            if not entry.reservation:
                gone.append(name)
                del self._by_slot[entry.slot]
                if entry.slot not in self._readers:
                    self._free.append(entry.slot)
        if gone:
            self._on_change((), gone)
        return len(gone)

    def chain(self, name: BlockHash) -> tuple[BlockHash, ...]:
        """The prefix that a block ends, first to last; empty when it is not here."""
        entry = self._entries.get(name)
        return () if entry is None else self._chain(entry)

    def _chain(self, entry: _Entry) -> tuple[BlockHash, ...]:
        chain = [entry.name]
        while entry.parent is not None:
            entry = self._entries[entry.parent]
            chain.append(entry.name)
        return tuple(reversed(chain))

    # --- people

    def pin(self, names: Sequence[BlockHash]) -> int:
        """Keeps the leading visible blocks until as many unpins; how many there are."""
        num_hit = self.match(names)
        for name in names[:num_hit]:
            self._entries[name].num_pins += 1
            self._directory.pin(name)
        return num_hit

    def unpin(self, names: Sequence[BlockHash]) -> int:
        """Takes one pin away from each block that has one; how many had."""
        pinned = [entry for name in names if (entry := self._entries.get(name)) is not None and entry.num_pins]
        for entry in pinned:
            entry.num_pins -= 1
            self._directory.unpin(entry.name)
        return len(pinned)

    def visible(self) -> list[BlockHash]:
        """All names that can be found, prefixes first."""
        return [e.name for e in sorted(self._entries.values(), key=lambda e: e.depth) if not e.reservation]

    def hottest(self, limit: int) -> list[HostBlock]:
        """The most used visible prefixes, by their last blocks: those that no longer one is used as often as."""
        visible = [entry for entry in self._entries.values() if not entry.reservation]
        inner = {e.parent for e in visible if e.parent and self._goes_on(self._entries[e.parent], e)}
        found = (entry for entry in visible if entry.name not in inner)
        return [
            HostBlock(name=e.name, tenant=e.tenant, depth=e.depth, num_uses=e.num_uses, pinned=e.num_pins > 0)
            for e in heapq.nlargest(limit, found, key=lambda e: (e.num_uses, -e.depth, e.name))
        ]

    @staticmethod
    def _goes_on(entry: _Entry, child: _Entry) -> bool:
        """Whether whoever uses and keeps a block does the same with its child."""
        return child.num_uses >= entry.num_uses and bool(child.num_pins) == bool(entry.num_pins)

    def check_invariants(self) -> None:
        """Asserts that every slot is in one place and that directory, entries and slots agree."""
        self._directory.check_invariants()
        assert len(self._directory) == len(self._entries)
        assert all(name in self._directory for name in self._entries)
        visible = {entry.slot: entry for entry in self._entries.values() if not entry.reservation}
        assert visible == self._by_slot
        written = [slot for r in self._reservations.values() for slot in r.slots]
        lingering = [slot for slot in self._readers if slot not in visible]
        slots = sorted([*self._free, *visible, *written, *lingering])
        assert slots == list(range(self.slab.num_slots)), "a slot is lost or in two places"
        for entry in self._entries.values():
            if entry.reservation:
                assert entry.slot in self._reservations[entry.reservation].slots
