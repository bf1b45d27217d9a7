"""Bytes of one rank's cache by the model's layers and heads: the same bytes in the same order, however it is cut."""

from __future__ import annotations

import pytest
import torch

from tandem.kv.cache import KvCache
from tandem.kv.layout import KvLayout
from tandem.kv.sharding import Sharding
from tandem.types import BlockId

NUM_BLOCKS, SIZE, DIM = 5, 8, 4
BLOCKS = [BlockId(b) for b in (3, 4, 1)]


def make_cache(*, tp: int = 1, pp: int = 1, rank: int = 0) -> KvCache:
    sharding = Sharding(num_layers=4, num_kv_heads=4, block_size=SIZE, tp=tp, pp=pp)
    shard = sharding.shard(rank)
    layout = KvLayout(
        num_layers=len(shard.layers), num_kv_heads=len(shard.heads), head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    slab = torch.zeros(layout.slab_bytes(NUM_BLOCKS), dtype=torch.uint8)
    return KvCache(layout, NUM_BLOCKS, slab, sharding=sharding, rank=rank)


def fill(cache: KvCache) -> KvCache:
    """Every (layer, block, K or V, head) has a number of its own."""
    for layer, values in zip(cache.shard.layers, cache.layers, strict=True):
        for block in range(NUM_BLOCKS):
            for plane in (0, 1):
                for index, head in enumerate(cache.shard.heads):
                    values[block, plane, index] = 1000 * layer + 100 * block + 10 * plane + head
    return cache


def numbers(segments: list[torch.Tensor]) -> list[float]:
    return torch.cat(segments).view(torch.float32).view(-1, SIZE * DIM)[:, 0].tolist()


@pytest.mark.parametrize(("tp", "pp", "rank"), [(1, 1, 0), (2, 1, 1), (4, 1, 2), (2, 2, 3)])
def test_some_heads_of_some_blocks_are_the_same_bytes_on_every_rank_that_has_them(tp: int, pp: int, rank: int) -> None:
    cache, whole = fill(make_cache(tp=tp, pp=pp, rank=rank)), fill(make_cache())
    for layer in cache.shard.layers:
        for head in cache.shard.heads:
            heads = range(head, cache.shard.heads.stop)
            assert numbers(cache.segments(layer, BLOCKS, heads)) == numbers(whole.segments(layer, BLOCKS, heads))


def test_neighbours_share_a_view_where_all_heads_are_wanted() -> None:
    cache = make_cache(tp=2, rank=1)
    assert [len(cache.segments(0, BLOCKS, heads)) for heads in (None, range(2, 4), range(2, 3))] == [2, 2, 6]


def test_a_layout_that_is_not_the_ranks_part_is_a_bug() -> None:
    layout = KvLayout(num_layers=4, num_kv_heads=4, head_dim=DIM, block_size=SIZE, dtype="float32")
    sharding = Sharding(num_layers=4, num_kv_heads=4, block_size=SIZE, tp=2)
    with pytest.raises(AssertionError):
        KvCache(layout, 1, torch.zeros(layout.slab_bytes(1), dtype=torch.uint8), sharding=sharding)
