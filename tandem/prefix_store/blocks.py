"""What the host tier says of blocks: those that are read, those that made room, those that are being written."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.types import BlockHash


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One block that is kept where it is for a reader. `generation` is its slot's while it holds this block."""

    name: BlockHash
    slot: int
    generation: int
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted:
    """A block that made room. Its bytes are in `slot` until whoever was given that begins to write.

    `chain` is its prefix's names, first to last, its own included; empty where a block after it made room, too: it is
    in that one's.
    """

    name: BlockHash
    slot: int
    tenant: str
    chain: tuple[BlockHash, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Slots for `names`, which follow one another in a prefix and come after `first` blocks of it. Ends once."""

    number: int
    first: int
    names: tuple[BlockHash, ...]
    slots: tuple[int, ...]
    evicted: tuple[Evicted, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBlock:
    """What `hottest` shows of a block."""

    name: BlockHash
    tenant: str
    depth: int
    num_uses: int
    pinned: bool
