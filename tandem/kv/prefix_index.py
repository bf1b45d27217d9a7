"""Who holds which blocks, in which tier, as the holders announce it; and how long a prefix each of them has. Pure.

An owner's state comes as a snapshot and then as batches numbered without a gap, under one epoch. A batch that does not
follow from what is known changes nothing and says so: then a new snapshot is due. A (owner, tier) is one bit, a name
maps to the bits of those that hold it, so a prefix is matched against all of them in one walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.types import BlockHash


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One announcement: what came to a tier of its owner and what went, under `epoch`, after batch `seq` - 1."""

    epoch: str
    seq: int
    tier: str
    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


@dataclass(slots=True)
class _Owner:
    epoch: str
    seq: int
    tiers: dict[str, int] = field(default_factory=dict)
    """Tier to its bit's position."""


@dataclass(slots=True)
class PrefixIndex:
    """Not thread-safe. Memory goes with the number of names held by anybody."""

    _owners: dict[str, _Owner] = field(default_factory=dict)
    _masks: dict[BlockHash, int] = field(default_factory=dict)
    _names: dict[int, set[BlockHash]] = field(default_factory=dict)
    """What each bit in use is set for."""
    _labels: dict[int, tuple[str, str]] = field(default_factory=dict)
    """(owner, tier) of each bit in use."""

    def __len__(self) -> int:
        return len(self._masks)

    def owners(self) -> tuple[str, ...]:
        """Those that have a snapshot here."""
        return tuple(self._owners)

    def position(self, owner: str) -> tuple[str, int] | None:
        """(epoch, seq) of the last that is known of an owner; None for one that is not known."""
        known = self._owners.get(owner)
        return None if known is None else (known.epoch, known.seq)

    def reset(self, owner: str, *, epoch: str, seq: int, tiers: Mapping[str, Iterable[BlockHash]]) -> None:
        """Takes an owner's snapshot in the place of all that was known of it."""
        self.drop(owner)
        self._owners[owner] = _Owner(epoch, seq)
        for tier, names in tiers.items():
            self._add(self._bit(owner, tier), names)

    def apply(self, owner: str, batch: Batch) -> bool:
        """Takes a batch. False when it does not follow from what is known; one that is known already is passed over."""
        known = self._owners.get(owner)
        if known is None or known.epoch != batch.epoch or batch.seq > known.seq + 1:
            return False
        if batch.seq <= known.seq:
            return True
        known.seq = batch.seq
        bit = self._bit(owner, batch.tier)
        self._add(bit, batch.added)
        self._remove(bit, batch.removed)
        return True

    def drop(self, owner: str) -> None:
        """Forgets an owner. Idempotent."""
        known = self._owners.pop(owner, None)
        for bit in known.tiers.values() if known is not None else ():
            self._remove(bit, tuple(self._names[bit]))
            del self._names[bit], self._labels[bit]

    def match(self, names: Sequence[BlockHash]) -> dict[str, dict[str, int]]:
        """For each owner that has the first name: how many leading names it has, by tier."""
        found: dict[str, dict[str, int]] = {}
        alive = self._masks.get(names[0], 0) if names else 0
        for index in range(1, len(names)):
            if not alive:
                break
            mask = alive & self._masks.get(names[index], 0)
            self._note(found, alive & ~mask, index)
            alive = mask
        self._note(found, alive, len(names))
        return found

    def _note(self, found: dict[str, dict[str, int]], bits: int, count: int) -> None:
        while bits:
            lowest = bits & -bits
            owner, tier = self._labels[lowest.bit_length() - 1]
            found.setdefault(owner, {})[tier] = count
            bits ^= lowest

    def _bit(self, owner: str, tier: str) -> int:
        """The position of its bit; the lowest that is free when it has none."""
        tiers = self._owners[owner].tiers
        if tier not in tiers:
            bit = next(position for position in range(len(self._labels) + 1) if position not in self._labels)
            tiers[tier] = bit
            self._labels[bit] = (owner, tier)
            self._names[bit] = set()
        return tiers[tier]

    def _add(self, bit: int, names: Iterable[BlockHash]) -> None:
        held = self._names[bit]
        for name in names:
            held.add(name)
            self._masks[name] = self._masks.get(name, 0) | 1 << bit

    def _remove(self, bit: int, names: Iterable[BlockHash]) -> None:
        held = self._names[bit]
        for name in names:
            if name in held:
                held.remove(name)
                if mask := self._masks[name] & ~(1 << bit):
                    self._masks[name] = mask
                else:
                    del self._masks[name]

    def check_invariants(self) -> None:
        """Asserts that bits, names and owners agree."""
        labels = {bit: (owner, tier) for owner, known in self._owners.items() for tier, bit in known.tiers.items()}
        assert labels == self._labels
        assert set(labels) == set(self._names)
        masks: dict[BlockHash, int] = {}
        for bit, names in self._names.items():
            for name in names:
                masks[name] = masks.get(name, 0) | 1 << bit
        assert masks == self._masks
