"""Plans between workers that are cut differently, carried out on real tensors: every byte where it belongs, once."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kv_transfer.plan import pieces, plan_copies
from tandem.errors import ConfigError
from tandem.kv.sharding import Sharding
from tandem.types import BlockId

HEAD_DIM = 2
UNTOUCHED = -1


def make_truth(cut: Sharding, num_tokens: int) -> torch.Tensor:
    """[layers, 2, heads, tokens, head_dim], every value another."""
    shape = (cut.num_layers, 2, cut.num_kv_heads, num_tokens, HEAD_DIM)
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape)


def make_cache(cut: Sharding, num_blocks: int) -> list[torch.Tensor]:
    """Each rank's [layers, blocks, 2, heads, block_size, head_dim], as `tandem.kv.cache` has it."""
    return [
        torch.full((len(s.layers), num_blocks, 2, len(s.heads), cut.block_size, HEAD_DIM), UNTOUCHED)
        for s in cut.shards()
    ]


def make_table(cut: Sharding, num_tokens: int, drawn: random.Random) -> list[BlockId]:
    """Blocks in no order, some of the pool left out."""
    needed = -(-num_tokens // cut.block_size)
    return [BlockId(b) for b in drawn.sample(range(needed + 3), needed)]


def fill(cut: Sharding, cache: list[torch.Tensor], table: list[BlockId], truth: torch.Tensor, tokens: range) -> None:
    """Writes what an engine would have written for `tokens`."""
    for shard, mine in zip(cut.shards(), cache, strict=True):
        part = truth[shard.layers.start : shard.layers.stop, :, shard.heads.start : shard.heads.stop]
        for token in tokens:
            block, offset = table[token // cut.block_size], token % cut.block_size
            mine[:, block, :, :, offset] = part[:, :, :, token]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Sharding, Sharding]:
    num_layers, num_kv_heads = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4, 6]))
    tps = [tp for tp in range(1, 13) if num_kv_heads % tp == 0 or tp % num_kv_heads == 0]
    one, other = (
        Sharding(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            block_size=draw(st.sampled_from([2, 4, 8])),
            tp=draw(st.sampled_from(tps)),
            pp=draw(st.integers(1, num_layers)),
        )
        for _ in range(2)
    )
    return one, other


@settings(max_examples=60, deadline=None)
@given(pair=cuts(), num_tokens=st.integers(1, 20), seed=st.integers(0, 1000), data=st.data())
def test_every_rank_gets_what_it_lacks_once_and_nothing_else(
    pair: tuple[Sharding, Sharding], num_tokens: int, seed: int, data: st.DataObject
) -> None:
    source, destination = pair
    drawn = random.Random(seed)
    truth = make_truth(source, num_tokens)
    source_table, table = make_table(source, num_tokens, drawn), make_table(destination, num_tokens, drawn)
    source_cache = make_cache(source, len(source_table) + 3)
    fill(source, source_cache, source_table, truth, range(num_tokens))
    held = [data.draw(st.integers(0, num_tokens)) for _ in destination.shards()]
    cache = make_cache(destination, len(table) + 3)
    for copy in plan_copies(source, destination, num_tokens=num_tokens, held_tokens=held):
        giver, taker = source.shards()[copy.source_rank], destination.shards()[copy.destination_rank]
        places = pieces(copy.tokens, source, destination, source_blocks=source_table, destination_blocks=table)
        for piece in places:
            target = cache[taker.rank][
                copy.layers.start - taker.layers.start : copy.layers.stop - taker.layers.start,
                piece.destination_block,
                :,
                copy.heads.start - taker.heads.start : copy.heads.stop - taker.heads.start,
                piece.destination_offset : piece.destination_offset + piece.num_tokens,
            ]
            assert (target == UNTOUCHED).all(), "written twice"
            target.copy_(
                source_cache[giver.rank][
                    copy.layers.start - giver.layers.start : copy.layers.stop - giver.layers.start,
                    piece.source_block,
                    :,
                    copy.heads.start - giver.heads.start : copy.heads.stop - giver.heads.start,
                    piece.source_offset : piece.source_offset + piece.num_tokens,
                ]
            )
    right = make_cache(destination, len(table) + 3)
    for rank, first in enumerate(held):
        one = make_cache(destination, len(table) + 3)
        fill(destination, one, table, truth, range(first, num_tokens))
        right[rank] = one[rank]
    assert all(torch.equal(mine, expected) for mine, expected in zip(cache, right, strict=True))


@given(pair=cuts(), num_tokens=st.integers(1, 10_000))
def test_the_number_of_copies_does_not_depend_on_the_prompt(
    pair: tuple[Sharding, Sharding], num_tokens: int
) -> None:
    source, destination = pair
    count = len(plan_copies(source, destination, num_tokens=num_tokens))
    assert count == len(plan_copies(source, destination, num_tokens=1))
    assert count <= source.tp * source.pp * destination.tp * destination.pp


def test_what_every_rank_holds_is_not_sent() -> None:
    cut = Sharding(num_layers=2, num_kv_heads=2, block_size=4, tp=2)
    assert plan_copies(cut, cut, num_tokens=8, held_tokens=[8, 8]) == []
    [copy] = plan_copies(cut, cut, num_tokens=8, held_tokens=[8, 4])
    assert (copy.destination_rank, copy.tokens) == (1, range(4, 8))


def test_ranks_that_hold_the_same_head_share_the_sending() -> None:
    source = Sharding(num_layers=1, num_kv_heads=1, block_size=4, tp=2)
    destination = Sharding(num_layers=1, num_kv_heads=1, block_size=4, tp=4)
    givers = [copy.source_rank for copy in plan_copies(source, destination, num_tokens=4)]
    assert givers == [0, 1, 0, 1]


@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 3}, {"pp": 0}])
def test_a_cut_that_does_not_divide_the_model_is_refused(cut: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Sharding(num_layers=2, num_kv_heads=3, block_size=4, **cut)


def test_two_models_are_refused() -> None:
    one, other = (Sharding(num_layers=n, num_kv_heads=1, block_size=4) for n in (1, 2))
    with pytest.raises(ConfigError):
        plan_copies(one, other, num_tokens=4)
