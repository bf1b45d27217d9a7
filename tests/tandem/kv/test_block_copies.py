"""Blocks between a cache and slots of the host: the bytes, and in which order a GPU would be asked to move them."""

from __future__ import annotations

import pytest
import torch

from tandem.kv.block_copies import BlockCopies
from tandem.kv.cache import KvCache
from tandem.kv.copy_stream import CopyChannel, CudaChannel, HostChannel
from tandem.kv.layout import KvLayout
from tandem.types import BlockId
from tests.fake_cuda import NotedCuda, NotedStream
from tests.gpus import need_gpus

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype="bfloat16")
NUM_BLOCKS, NUM_SLOTS = 6, 5
BLOCKS, SLOTS = [BlockId(b) for b in (4, 0, 2)], [3, 1, 4]
HOST = torch.device("cpu")


def make_cache(device: torch.device = HOST) -> KvCache:
    drawn = torch.randint(0, 256, (LAYOUT.slab_bytes(NUM_BLOCKS),), dtype=torch.uint8)
    return KvCache(LAYOUT, NUM_BLOCKS, drawn.to(device))


def make_slab(copies: BlockCopies) -> torch.Tensor:
    return torch.zeros(NUM_SLOTS, copies.block_bytes, dtype=torch.uint8)


def noted(cuda: NotedCuda) -> list[CopyChannel]:
    side = NotedStream(cuda, "side")
    return [CudaChannel(HOST, side, allocate=cuda.allocate, cuda=cuda) for _ in range(2)]


def stored_and_loaded(ways: list[CopyChannel] | None, device: torch.device = HOST) -> bool:
    """Whether blocks come back as they went, into another cache and other places, and nothing else changes."""
    cache, other = make_cache(device), make_cache(device)
    before = [layer.clone() for layer in other.layers]
    out, back = BlockCopies(cache, ways), BlockCopies(other, ways)
    slab = make_slab(out)
    out.store(slab, slots=SLOTS, blocks=BLOCKS)
    for layer in range(LAYOUT.num_layers):
        back.load_layer(layer, slab, slots=SLOTS, blocks=[BlockId(b) for b in (1, 5, 3)])
    for ours, theirs, kept in zip(cache.layers, other.layers, before, strict=True):
        sent, found = ours.view(torch.int16), theirs.view(torch.int16)
        if not torch.equal(found[[1, 5, 3]], sent[[4, 0, 2]]):
            return False
        if not torch.equal(found[[0, 2, 4]], kept.view(torch.int16)[[0, 2, 4]]):
            return False
    return not slab[[0, 2]].any()


@pytest.mark.parametrize("is_noted", [False, True])
def test_blocks_come_back_from_their_slots_as_they_went(is_noted: bool) -> None:
    assert stored_and_loaded(noted(NotedCuda()) if is_noted else None)


def test_the_host_has_a_way_of_its_own() -> None:
    copies = BlockCopies(make_cache())
    assert isinstance(copies._load, HostChannel)
    assert isinstance(copies._store, HostChannel)


def test_a_store_begins_after_what_the_engine_queued_and_reads_each_layer_when_it_has_come() -> None:
    cuda = NotedCuda()
    copies = BlockCopies(make_cache(), noted(cuda))
    copies.store(make_slab(copies), slots=SLOTS, blocks=BLOCKS)
    assert cuda.calls == [
        "begin on side",
        "side waits for what compute had",
        *["wait for side"] * LAYOUT.num_layers,
        "wait for side",
        "end on side",
    ]


def test_only_the_first_layer_of_a_load_waits_for_the_engine_and_each_is_there_when_it_returns() -> None:
    cuda = NotedCuda()
    copies = BlockCopies(make_cache(), noted(cuda))
    for layer in range(2):
        copies.load_layer(layer, make_slab(copies), slots=SLOTS, blocks=BLOCKS)
    assert cuda.calls == [
        *["begin on side", "side waits for what compute had", "wait for side", "end on side"],
        *["begin on side", "wait for side", "end on side"],
    ]


def test_pinned_memory_is_made_once_and_used_again() -> None:
    cuda = NotedCuda()
    copies = BlockCopies(make_cache(), noted(cuda))
    for _ in range(5):
        copies.store(make_slab(copies), slots=SLOTS, blocks=BLOCKS)
        copies.load_layer(1, make_slab(copies), slots=SLOTS, blocks=BLOCKS)
    assert len(cuda.allocated) == 3  # each way's block numbers and rows up, the store's rows down


def test_a_block_set_aside_is_still_copied_by_nobody_and_counted_by_nobody() -> None:
    cache = make_cache()
    assert cache.set_aside() == NUM_BLOCKS - 1
    assert cache.num_blocks == NUM_BLOCKS - 1
    assert BlockCopies(cache).block_bytes == LAYOUT.num_layers * LAYOUT.block_layer_bytes


@pytest.mark.gpu
def test_blocks_of_a_gpu_come_back_as_they_went() -> None:
    (gpu,) = need_gpus()
    assert stored_and_loaded(None, gpu)
