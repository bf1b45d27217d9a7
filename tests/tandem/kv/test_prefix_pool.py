"""The device tier against its promises, by rule and with random histories of sequences."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv.hashing import CacheIdentity, block_hashes, root_hash
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import BlockHash

ROOT = root_hash(CacheIdentity(fingerprint="tests"))


def names(*tokens: int) -> tuple[BlockHash, ...]:
    """One name for each token: blocks of one token."""
    return block_hashes(ROOT, tokens, 1)


def test_a_released_named_block_is_found_again_and_counts_as_free() -> None:
    pool = PrefixPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(names(1, 2), blocks)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.acquire(names(1, 2, 3)) == blocks
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_an_unnamed_block_is_simply_free() -> None:
    pool = PrefixPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_allocation_evicts_children_before_parents_and_only_what_it_needs() -> None:
    pool = PrefixPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.publish(names(1, 2, 3), blocks)
    pool.release(blocks)
    assert pool.allocate(1) == (blocks[2],)
    assert pool.match(names(1, 2, 3)) == 2
    assert pool.num_evicted == 1


def test_blocks_in_use_are_never_evicted() -> None:
    pool = PrefixPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(names(1, 2), blocks)
    assert not pool.can_allocate(1)
    assert pool.allocate(1) is None


def test_a_prefix_is_named_piece_by_piece() -> None:
    pool = PrefixPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.publish(names(1), blocks[:1]) == blocks[:1]
    assert pool.publish(names(1, 2, 3), blocks[1:], num_known=1) == blocks[1:]
    assert pool.found(names(1, 2, 3)) == blocks
    with pytest.raises(AssertionError):
        pool.publish(names(1, 2, 3), blocks, num_known=1)
    pool.check_invariants()


def test_what_was_computed_twice_is_found_once_and_its_prefix_stays_as_long_as_its_children() -> None:
    pool = PrefixPool(4)
    first, second = pool.allocate(1), pool.allocate(2)
    assert first is not None
    assert second is not None
    pool.publish(names(1), first)
    assert pool.publish(names(1, 2), second) == (first[0], second[1])
    pool.release(first)
    assert pool.num_references(first[0]) == 1, "held for the sequence that named its child"
    assert pool.allocate(2) is None
    pool.release((*second, first[0]))
    assert pool.num_free == 4
    assert pool.match(names(1, 2)) == 2


def test_a_name_leads_to_its_whole_prefix_and_its_tenant() -> None:
    pool = PrefixPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    chain = names(1, 2, 3)
    pool.publish(chain, blocks, tenant="someone")
    prefix = pool.prefix_of(chain[1])
    assert (prefix.names, prefix.blocks, prefix.tenant) == (chain[:2], blocks[:2], "someone")


def test_what_would_go_first_are_leaves_that_nobody_uses() -> None:
    pool = PrefixPool(4)
    one, two = pool.allocate(2), pool.allocate(1)
    assert one is not None
    assert two is not None
    pool.publish(names(1, 2), one)
    pool.publish(names(7), two)
    assert pool.next_to_go(4) == ()
    pool.release(one)
    assert pool.next_to_go(4) == names(1, 2)[1:]
    pool.release(two)
    assert set(pool.next_to_go(4)) == {*names(7), names(1, 2)[1]}
    assert pool.allocate(2) is not None
    assert pool.num_named == 2


def test_changes_are_told_once_and_what_came_and_went_not_at_all() -> None:
    pool = PrefixPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(names(1), blocks)
    assert tuple(pool.take_changes().added) == names(1)
    pool.release(blocks)
    assert pool.clear() == 1
    changes = pool.take_changes()
    assert (tuple(changes.added), tuple(changes.removed)) == ((), names(1))
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(names(5), blocks)
    pool.release(blocks)
    pool.clear()
    changes = pool.take_changes()
    assert (changes.added, changes.removed) == ({}, {})


@given(st.integers(0, 2**32), st.integers(3, 24))
def test_random_sequences_keep_the_pool_whole(seed: int, num_blocks: int) -> None:
    """Sequences over few tokens, so that they share; each acquires, computes, publishes piecemeal and ends."""
    rng = random.Random(seed)
    pool = PrefixPool(num_blocks)
    known: dict[BlockHash, None] = {}
    live: list[tuple[tuple[BlockHash, ...], list[int], list[int], list[int]]] = []
    for _ in range(60):
        move = rng.random()
        if move < 0.5:
            chain = names(*(rng.randrange(2) for _ in range(rng.randint(1, 6))))
            hits = pool.acquire(chain)
            assert len(hits) == pool.match(chain)
            fresh = pool.allocate(len(chain) - len(hits))
            if fresh is None:
                pool.release(hits)
            else:
                live.append((chain, [*hits, *fresh], [], list(hits)))
        elif move < 0.75 and live:
            chain, blocks, anchors, named = live[rng.randrange(len(live))]
            first, end = len(named), rng.randint(len(named), len(chain))
            own = blocks[first:end]
            found = pool.publish(chain[:end], own, num_known=first)  # type: ignore[arg-type]
            anchors += [f for f, b in zip(found, own, strict=True) if f != b]
            named += found
        elif live:
            _, blocks, anchors, _ = live.pop(rng.randrange(len(live)))
            pool.release([*blocks, *anchors])  # type: ignore[list-item]
        changes = pool.take_changes()
        assert not set(changes.added) & set(known)
        assert set(changes.removed) <= set(known)
        known = {name: None for name in [*known, *changes.added] if name not in changes.removed}
        assert set(known) == set(pool.names())
        pool.check_invariants()
    for _, blocks, anchors, _ in live:
        pool.release([*blocks, *anchors])  # type: ignore[list-item]
    assert pool.num_free == num_blocks
    assert pool.allocate(num_blocks) is not None, "everything can be had again"
