"""The device tier: a worker's KV blocks, of which those that nobody uses any more are kept to be found by prefix. Pure.

A block is free, in use (counted references), or cached: named, and without a reference. Cached blocks count as free
because allocation takes them when there are no others, lowest priority first and never a parent before its children.
A block in use may be named already: then others share it. Whoever references a named block references all of its
prefix, by names at least; so every cached block can be evicted, and `num_free` is what can be had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.kv.block_pool import BlockPool
from tandem.kv.eviction import EvictionPolicy, Lrfu
from tandem.kv.prefix_directory import PrefixDirectory
from tandem.types import BlockHash, BlockId


@dataclass(kw_only=True, slots=True)
class Changes:
    """Names that came and went since they were last asked for; each at most once, on one side."""

    added: dict[BlockHash, None] = field(default_factory=dict)
    removed: dict[BlockHash, None] = field(default_factory=dict)

    def add(self, name: BlockHash) -> None:
        """A name came."""
        if name in self.removed:
            del self.removed[name]
        else:
            self.added[name] = None

    def remove(self, name: BlockHash) -> None:
        """A name went."""
        if name in self.added:
            del self.added[name]
        else:
            self.removed[name] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedPrefix:
    """Blocks of a prefix, first to last, and what they are called."""

    names: tuple[BlockHash, ...]
    blocks: tuple[BlockId, ...]
    tenant: str


class PrefixPool:
    """`num_blocks` blocks, all free at the start. Offers what `BlockPool` does, and names."""

    def __init__(self, num_blocks: int, *, policy: EvictionPolicy | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._pool = BlockPool(num_blocks)
        self._directory = PrefixDirectory(capacity=num_blocks, policy=policy or Lrfu())
        self._block_of: dict[BlockHash, BlockId] = {}
        self._name_of: dict[BlockId, BlockHash] = {}
        """Named blocks; the cache itself holds one reference to each in `_pool`."""
        self._num_cached = 0
        self._changes = Changes()

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, cached ones among them."""
        return self._pool.num_free + self._num_cached

    @property
    def num_cached(self) -> int:
        """Named blocks that nobody uses."""
        return self._num_cached

    @property
    def num_named(self) -> int:
        """Blocks that can be found by name, in use or not."""
        return len(self._name_of)

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `allocate(num_blocks)` would succeed."""
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """`num_blocks` blocks with one reference each, or None (and nothing taken) when there are not enough."""
        if not self.can_allocate(num_blocks):
            return None
        for _ in range(num_blocks - self._pool.num_free):
            name = self._directory.pop_lowest()
            assert name is not None, "a cached block that cannot be evicted"
            self._forget(name)
            self.num_evicted += 1
        return self._pool.allocate(num_blocks)

    def match(self, names: Sequence[BlockHash]) -> int:
        """How many leading names are here."""
        return self._directory.match(names)

    def found(self, names: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """The leading blocks that are here, without a reference and without counting as a use."""
        return tuple(self._block_of[name] for name in names[: self._directory.match(names)])

    def acquire(self, names: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """One more reference to each leading block that is here; counts as a use of them."""
        blocks = tuple(self._block_of[name] for name in names[: self._directory.use(names)])
        self.share(blocks)
        return blocks

    def publish(
        self, names: Sequence[BlockHash], blocks: Sequence[BlockId], *, num_known: int = 0, tenant: str = ""
    ) -> tuple[BlockId, ...]:
        """Names blocks that the caller references, whole and in order from the first of a prefix.

        The first `num_known` names were given by an earlier call, and the caller has references to their blocks;
        `blocks` are those of the others. Returns, in order, the block that is found by each of these from now on: the
        caller's own, or another that had the name before. The caller gets a reference to such another too, so that it
        keeps the prefix of what it names.
        """
        assert len(names) == num_known + len(blocks)
        self._directory.insert(names, num_known=num_known, tenant=tenant)
        found, fresh = [], []
        for name, block in zip(names[num_known:], blocks, strict=True):
            known = self._block_of.get(name)
            if known is None:
                assert block not in self._name_of, f"block {block} has a name already"
                self._block_of[name] = known = block
                self._name_of[block] = name
                self._changes.add(name)
                fresh.append(name)
            elif known != block:
                self.share((known,))
            found.append(known)
        self._pool.share(self._block_of[name] for name in fresh)  # the cache's own; asserts that they are in use
        self._directory.pin(*fresh)
        return tuple(found)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each block; all must be in use or cached."""
        for block in blocks:
            name = self._name_of.get(block)
            if name is not None and not self.num_references(block):
                self._directory.pin(name)
                self._num_cached -= 1
            self._pool.share((block,))

    def num_references(self, block: BlockId) -> int:
        """How many use the block."""
        return self._pool.num_references(block) - (block in self._name_of)

    def is_shared(self, block: BlockId) -> bool:
        """Whether more than one uses the block."""
        return self.num_references(block) > 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Takes one reference from each block; with the last one it is free, or cached when it has a name."""
        for block in blocks:
            left = self._pool.release_one(block)
            name = self._name_of.get(block)
            if name is None:
                continue
            assert left, f"block {block} is not in use"
            if left == 1:  # the cache's own
                self._directory.unpin(name)
                self._num_cached += 1

    def clear(self, *, limit: int | None = None) -> int:
        """Forgets names that are not in use, at most `limit` of them, those that would go first before others."""
        num_cleared = 0
        while num_cleared != limit and (name := self._directory.pop_lowest()) is not None:
            self._forget(name)
            num_cleared += 1
        return num_cleared

    def _forget(self, name: BlockHash) -> None:
        block = self._block_of.pop(name)
        del self._name_of[block]
        self._pool.release((block,))
        self._num_cached -= 1
        self._changes.remove(name)

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def prefix_of(self, name: BlockHash) -> NamedPrefix:
        """A named block with all that leads to it."""
        names = self._directory.path(name)
        blocks = tuple(self._block_of[n] for n in names)
        return NamedPrefix(names=names, blocks=blocks, tenant=self._directory.tenant(name))

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._block_of

    def next_to_go(self, count: int) -> tuple[BlockHash, ...]:
        """Names that would be evicted first; their parents follow once they are gone."""
        return self._directory.lowest(count)

    def names(self) -> tuple[BlockHash, ...]:
        """All names, parents before children."""
        return self._directory.names()

    def check_invariants(self) -> None:
        """Asserts that references, names and the directory agree."""
        self._pool.check_invariants()
        self._directory.check_invariants()
        assert {block: name for name, block in self._block_of.items()} == self._name_of
        assert len(self._directory) == len(self._name_of)
        assert all(name in self._directory for name in self._block_of)
        assert self._num_cached == sum(not self.num_references(block) for block in self._name_of)
