"""The block pool against a model of it, under random use."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.kv.block_pool import BlockPool
from tandem.kv.layout import contiguous_runs


class BlockPoolMachine(RuleBasedStateMachine):
    """Allocates, shares and releases; the model is a plain count per block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24)
        self.held: list[tuple[int, ...]] = []

    @rule(num_blocks=st.integers(0, 10))
    def allocate(self, num_blocks: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(num_blocks)
        assert (blocks is None) == (num_blocks > free)
        if blocks is not None:
            assert len(set(blocks)) == num_blocks
            assert not set(blocks) & {b for other in self.held for b in other}
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.share(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index))

    @invariant()
    def free_is_what_nobody_holds(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_free == 24 - len({b for blocks in self.held for b in blocks})


TestBlockPool = BlockPoolMachine.TestCase


def test_blocks_come_as_one_run_when_one_is_long_enough() -> None:
    pool = BlockPool(16)
    first = pool.allocate(4)
    second = pool.allocate(2)
    assert first is not None
    assert second is not None
    pool.release(first)
    blocks = pool.allocate(4)
    assert blocks is not None
    assert len(contiguous_runs(blocks)) == 1
    assert blocks == first


def test_nothing_is_taken_when_not_everything_fits() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


def test_releasing_a_free_block_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="not in use"):
        BlockPool(4).release([0])  # type: ignore[list-item]
