"""Which blocks a tier holds, found by prefix, and which of them make room for others. Pure; holds names, not bytes.

Blocks form trees: each has its prefix's last block as parent. A block is only here while its parent is, so the longest
hit is the number of leading names that are present, and eviction takes leaves only: never a parent before its children,
never a pinned block or one with a pinned descendant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest

from tandem.kv.eviction import EvictionPolicy
from tandem.types import BlockHash


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What an insertion changed: names that are new, in order, and names that made room for them."""

    admitted: tuple[BlockHash, ...]
    evicted: tuple[BlockHash, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBlock:
    """A block as it is put back after a restart: with its priority where that is known, else as stored at `clock`."""

    name: BlockHash
    parent: BlockHash | None
    tenant: str
    clock: int
    priority: float | None = None


@dataclass(slots=True)
class _Block:
    name: BlockHash
    parent: BlockHash | None
    tenant: str
    priority: float
    depth: int
    num_children: int = 0
    num_pins: int = 0

    @property
    def may_go(self) -> bool:
        return not self.num_children and not self.num_pins


@dataclass(slots=True)
class PrefixDirectory:
    """Up to `capacity` blocks. A tenant with a quota holds no more than that; others share what there is."""

    capacity: int
    policy: EvictionPolicy
    quotas: Mapping[str, int] = field(default_factory=dict)
    tenant_share: float = 1.0
    """Of the capacity: the quota of tenants without one of their own, but for the one without a name."""
    _num_events: int = 0
    """Blocks admitted and calls of `use` so far: the clock."""
    _blocks: dict[BlockHash, _Block] = field(default_factory=dict)
    """In the order in which they came: parents before their children."""
    _usage: dict[str, int] = field(default_factory=dict)
    _leaves: list[tuple[float, int, BlockHash]] = field(default_factory=list)
    """(priority, -depth, name) of every leaf, and outdated entries, which are dropped when they come up."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._blocks

    def match(self, names: Sequence[BlockHash]) -> int:
        """How many leading names are present."""
        for index, name in enumerate(names):
            if name not in self._blocks:
                return index
        return len(names)

    def use(self, names: Sequence[BlockHash]) -> int:
        """Like `match`, and counts as a use of the blocks that were hit."""
        num_hit = self.match(names)
        self._num_events += 1
        for name in names[:num_hit]:
            block = self._blocks[name]
            block.priority = self.policy.used(name, before=block.priority, now=self._now)
            self._offer(block)
        return num_hit

    def insert(self, names: Sequence[BlockHash], *, num_known: int = 0, tenant: str = "") -> Admission:
        """Adds the blocks of a prefix that are missing, first to last, for as long as room can be made.

        Room is never made by blocks of this prefix. What was present already keeps its tenant and is not used; the
        caller knows of the first `num_known` that they are present.
        """
        num_hit = num_known + self.match(names[num_known:] if num_known else names)
        path: frozenset[BlockHash] | None = None
        admitted: list[BlockHash] = []
        evicted: list[BlockHash] = []
        parent = names[num_hit - 1] if num_hit else None
        for depth, name in enumerate(names[num_hit:], start=num_hit):
            if not self._has_room(tenant):
                path = frozenset(names[:num_hit]) if path is None else path
                victim = self._make_room(tenant, path, parent)
                if victim is None:
                    break
                evicted.append(victim)
            self._add(name, parent, tenant=tenant, depth=depth)
            admitted.append(name)
            parent = name
        if admitted:
            self._offer(self._blocks[admitted[-1]])  # the others have a child
        return Admission(admitted=tuple(admitted), evicted=tuple(evicted))

    def pin(self, *names: BlockHash) -> None:
        """Keeps blocks until as many unpins; the prefix of each stays because it has a child."""
        for name in names:
            self._blocks[name].num_pins += 1

    def unpin(self, name: BlockHash) -> None:
        """Takes one pin away."""
        block = self._blocks[name]
        assert block.num_pins > 0, "not pinned"
        block.num_pins -= 1
        self._offer(block)

    def num_pins(self, name: BlockHash) -> int:
        """Pins of a block itself; 0 also where it is not here."""
        return self._blocks[name].num_pins if name in self._blocks else 0

    def remove(self, *names: BlockHash) -> tuple[BlockHash, ...]:
        """Forgets blocks whose bytes are no good, and all that is only reached through them, pinned or not."""
        gone = [self._blocks[name] for name in dict.fromkeys(names) if name in self._blocks]
        if any(block.num_children for block in gone):
            below = set(names)
            gone = [block for block in self._blocks.values() if self._is_below(block, below)]
        for victim in sorted(gone, key=lambda block: -block.depth):
            self._drop(victim)
        return tuple(block.name for block in gone)

    @staticmethod
    def _is_below(block: _Block, gone: set[BlockHash]) -> bool:
        """Whether a block goes, being named or below one that goes; adds it. Asked of parents before children."""
        if block.parent in gone:
            gone.add(block.name)
        return block.name in gone

    def pop_lowest(self) -> BlockHash | None:
        """Evicts the block of lowest priority that may go; None when there is none."""
        block = self._lowest(frozenset(), None, tenant=None)
        if block is None:
            return None
        self._drop(block)
        return block.name

    def path(self, name: BlockHash) -> tuple[BlockHash, ...]:
        """A present block's whole prefix, first to last, itself included."""
        names = []
        block: _Block | None = self._blocks[name]
        while block is not None:
            names.append(block.name)
            block = self._blocks[block.parent] if block.parent is not None else None
        return tuple(reversed(names))

    def tenant(self, name: BlockHash) -> str:
        """Whose a present block is."""
        return self._blocks[name].tenant

    def lowest(self, count: int) -> tuple[BlockHash, ...]:
        """Up to `count` blocks that may go now, those that would go first before others. Linear in leaves."""
        entries = nsmallest(count, {entry[2]: entry for entry in self._leaves if self._is_current(entry)}.values())
        return tuple(name for _, _, name in entries)

    def _is_current(self, entry: tuple[float, int, BlockHash]) -> bool:
        block = self._blocks.get(entry[2])
        return block is not None and block.may_go and block.priority == entry[0]

    def clear(self) -> tuple[BlockHash, ...]:
        """Forgets everything, pinned or not; what it was."""
        gone = self.names()
        self._blocks.clear()
        self._usage.clear()
        self._leaves.clear()
        return gone

    @property
    def clock(self) -> int:
        """Events so far. A directory that is put back goes on from here."""
        return self._num_events

    def names(self) -> tuple[BlockHash, ...]:
        """All blocks that are present, parents before their children."""
        return tuple(self._blocks)

    def priorities(self) -> dict[BlockHash, float]:
        """What `restore` needs to evict later as if nothing had happened."""
        return {block.name: block.priority for block in self._blocks.values()}

    def restore(self, blocks: Iterable[SavedBlock], *, clock: int) -> None:
        """Puts blocks into an empty directory, in any order, each name once.

        What has no way to its root is left out; what is too much, of a tenant or in all, makes room as ever.
        """
        assert not self._blocks, "not empty"
        below: dict[BlockHash | None, list[SavedBlock]] = {}
        for saved in blocks:
            below.setdefault(saved.parent, []).append(saved)
        level = below.get(None, [])
        depth = 0
        while level:
            for saved in level:
                self._put_back(saved, depth)
            level = [child for saved in level for child in below.get(saved.name, [])]
            depth += 1
        self._num_events = max(clock, self._num_events)
        self._trim()

    def _put_back(self, saved: SavedBlock, depth: int) -> None:
        now = saved.clock / max(1, self.capacity)
        priority = saved.priority
        if priority is None:
            priority = self.policy.used(saved.name, before=None, now=now)
        block = _Block(saved.name, saved.parent, saved.tenant, priority, depth)
        self._enter(block)
        self._offer(block)

    def _trim(self) -> None:
        for tenant in tuple(self._usage):
            quota = self._quota_of(tenant)
            while quota is not None and self._usage.get(tenant, 0) > quota:
                self._drop_one(tenant)
        while len(self._blocks) > self.capacity:
            self._drop_one(None)

    def _drop_one(self, tenant: str | None) -> None:
        block = self._lowest(frozenset(), None, tenant=tenant)
        if block is not None:
            self._drop(block)
        else:  # all of them lie below blocks of others
            self.remove(max((b for b in self._blocks.values() if b.tenant == tenant), key=lambda b: b.depth).name)

    @property
    def _now(self) -> float:
        return self._num_events / max(1, self.capacity)

    def _quota_of(self, tenant: str) -> int | None:
        """None: as much as there is."""
        share = max(1, int(self.tenant_share * self.capacity)) if tenant and self.tenant_share < 1 else None
        return self.quotas.get(tenant, share)

    def _is_over_quota(self, tenant: str) -> bool:
        quota = self._quota_of(tenant)
        return quota is not None and self._usage.get(tenant, 0) >= quota

    def _has_room(self, tenant: str) -> bool:
        return len(self._blocks) < self.capacity and not self._is_over_quota(tenant)

    def _make_room(self, tenant: str, path: frozenset[BlockHash], parent: BlockHash | None) -> BlockHash | None:
        """The name that was evicted; None when there is no room to be had."""
        block = self._lowest(path, parent, tenant=tenant if self._is_over_quota(tenant) else None)
        if block is None:
            return None
        self._drop(block)
        return block.name

    def _lowest(self, path: frozenset[BlockHash], parent: BlockHash | None, *, tenant: str | None) -> _Block | None:
        kept: list[tuple[float, int, BlockHash]] = []
        found = None
        while self._leaves and found is None:
            entry = heappop(self._leaves)
            block = self._blocks.get(entry[2])
            if block is None or not self._is_current(entry):
                continue
            if block.name in path or block.name == parent or (tenant is not None and block.tenant != tenant):
                kept.append(entry)
            else:
                found = block
        for entry in kept:
            heappush(self._leaves, entry)
        return found

    def _add(self, name: BlockHash, parent: BlockHash | None, *, tenant: str, depth: int) -> None:
        self._num_events += 1
        self._enter(_Block(name, parent, tenant, self.policy.used(name, before=None, now=self._now), depth))

    def _enter(self, block: _Block) -> None:
        self._blocks[block.name] = block
        self._usage[block.tenant] = self._usage.get(block.tenant, 0) + 1
        if block.parent is not None:
            self._blocks[block.parent].num_children += 1

    def _drop(self, block: _Block) -> None:
        del self._blocks[block.name]
        self._usage[block.tenant] -= 1
        if not self._usage[block.tenant]:
            del self._usage[block.tenant]
        parent = self._blocks.get(block.parent) if block.parent is not None else None
        if parent is not None:
            parent.num_children -= 1
            self._offer(parent)

    def _offer(self, block: _Block) -> None:
        if block.may_go:
            heappush(self._leaves, (block.priority, -block.depth, block.name))
            if len(self._leaves) > 64 + 4 * len(self._blocks):
                self._leaves = [(b.priority, -b.depth, b.name) for b in self._blocks.values() if b.may_go]
                heapify(self._leaves)

    def check_invariants(self) -> None:
        """Asserts that trees, counts, quotas and the heap agree."""
        assert len(self._blocks) <= self.capacity
        children: dict[BlockHash, int] = {}
        usage: dict[str, int] = {}
        seen: set[BlockHash | None] = {None}
        for block in self._blocks.values():
            assert block.parent in seen, "a child before its parent"
            seen.add(block.name)
            usage[block.tenant] = usage.get(block.tenant, 0) + 1
            if block.parent is not None:
                assert block.parent in self._blocks, "a child without its parent"
                assert self._blocks[block.parent].depth == block.depth - 1
                children[block.parent] = children.get(block.parent, 0) + 1
        assert usage == self._usage
        for tenant, count in usage.items():
            quota = self._quota_of(tenant)
            assert quota is None or count <= quota
        current = {(priority, name) for priority, _, name in self._leaves}
        for block in self._blocks.values():
            assert block.num_children == children.get(block.name, 0)
            assert not block.may_go or (block.priority, block.name) in current
