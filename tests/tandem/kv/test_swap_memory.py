"""Host memory for swapped blocks: every byte goes out and comes back, whatever lies next to it."""

from __future__ import annotations

import torch

from tandem.kv.cache import KvCache
from tandem.kv.layout import KvLayout
from tandem.kv.swap_memory import SwapMemory
from tandem.types import BlockId

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype="float32")
NUM_BLOCKS = 9


def make_cache() -> KvCache:
    drawn = torch.Generator().manual_seed(1)
    num_bytes = LAYOUT.slab_bytes(NUM_BLOCKS)
    return KvCache(LAYOUT, NUM_BLOCKS, torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=drawn))


def blocks_of(cache: KvCache) -> torch.Tensor:
    return cache.slab.view(LAYOUT.num_layers, NUM_BLOCKS, -1)


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_blocks_come_back_byte_for_byte_wherever_they_go_and_others_stay_as_they_were() -> None:
    cache = make_cache()
    memory = SwapMemory(cache, 6)
    before = blocks_of(cache).clone()
    memory.copy_out(ids(4, 0, 7, 8), ids(5, 1, 2, 3))
    assert torch.equal(blocks_of(cache), before)
    blocks_of(cache)[:, [4, 0, 7, 8]] = 0
    memory.copy_in(ids(1, 2, 5, 3), ids(3, 6, 0, 2))
    after = blocks_of(cache)
    assert torch.equal(after[:, [3, 6, 0, 2]], before[:, [0, 7, 4, 8]])
    assert torch.equal(after[:, [1, 5]], before[:, [1, 5]])
    assert not after[:, [4, 7, 8]].any()


def test_slots_keep_what_is_in_them_while_others_are_written() -> None:
    cache = make_cache()
    memory = SwapMemory(cache, 4)
    before = blocks_of(cache).clone()
    memory.copy_out(ids(1, 2), ids(0, 1))
    memory.copy_out(ids(5, 6), ids(3, 2))
    memory.copy_in(ids(0, 1, 2, 3), ids(8, 7, 4, 3))
    assert torch.equal(blocks_of(cache)[:, [8, 7, 4, 3]], before[:, [1, 2, 6, 5]])
