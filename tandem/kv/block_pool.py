"""Who holds which KV block of one worker: free, or in use with counted references. Pure.

Allocation prefers runs of neighbouring blocks, because a run travels as one piece; it is all or nothing. A block is
free again when its last reference is released. Releasing what is not held is our own bug and asserts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from tandem.types import BlockId


class BlockPool:
    """`num_blocks` blocks, all free at the start."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._starts: list[int] = [0] if num_blocks else []
        self._ends: list[int] = [num_blocks] if num_blocks else []
        """Free runs [start, end), sorted, never adjacent."""
        self._references: dict[BlockId, int] = {}
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `allocate(num_blocks)` would succeed."""
        return num_blocks <= self._num_free

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """`num_blocks` blocks with one reference each, or None (and nothing taken) when there are not enough.

        Takes the smallest free run that holds them all, else the largest runs.
        """
        if not self.can_allocate(num_blocks):
            return None
        taken: list[BlockId] = []
        while len(taken) < num_blocks:
            taken += self._take_run(num_blocks - len(taken))
        for block in taken:
            self._references[block] = 1
        self._num_free -= num_blocks
        return tuple(taken)

    def _take_run(self, wanted: int) -> list[BlockId]:
        sizes = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        fitting = [size for size in sizes if size >= wanted]
        index = sizes.index(min(fitting) if fitting else max(sizes))
        start = self._starts[index]
        stop = min(start + wanted, self._ends[index])
        if stop == self._ends[index]:
            del self._starts[index], self._ends[index]
        else:
            self._starts[index] = stop
        return [BlockId(b) for b in range(start, stop)]

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each block; all must be in use."""
        for block in blocks:
            assert block in self._references, f"block {block} is not in use"
            self._references[block] += 1

    def num_references(self, block: BlockId) -> int:
        """How many hold the block; 0 when it is free."""
        return self._references.get(block, 0)

    def is_shared(self, block: BlockId) -> bool:
        """Whether more than one holds the block."""
        return self.num_references(block) > 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Takes one reference from each block; the last one frees it."""
        for block in blocks:
            self.release_one(block)

    def release_one(self, block: BlockId) -> int:
        """Takes one reference from a block, and says how many are left; the last one frees it."""
        left = self._references.get(block, 0) - 1
        assert left >= 0, f"block {block} is not in use"
        if left:
            self._references[block] = left
        else:
            del self._references[block]
            self._give_back(block)
        return left

    def _give_back(self, block: BlockId) -> None:
        at = bisect_left(self._starts, block)
        joins_left = at > 0 and self._ends[at - 1] == block
        joins_right = at < len(self._starts) and self._starts[at] == block + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_left:
            self._ends[at - 1] = block + 1
        elif joins_right:
            self._starts[at] = block
        else:
            self._starts.insert(at, block)
            self._ends.insert(at, block + 1)
        self._num_free += 1

    def check_invariants(self) -> None:
        """Asserts that free runs and references partition the pool."""
        free = [b for start, end in zip(self._starts, self._ends, strict=True) for b in range(start, end)]
        assert all(start < end for start, end in zip(self._starts, self._ends, strict=True))
        assert all(end < start for end, start in zip(self._ends, self._starts[1:], strict=False))
        assert len(free) == self._num_free
        assert not set(free) & set(self._references)
        assert len(free) + len(self._references) == self.num_blocks
        assert all(count > 0 for count in self._references.values())
