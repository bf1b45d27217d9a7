"""Host memory for KV blocks that leave one rank's cache for a while, and the copies both ways. Decides nothing.

Layers lie apart as in the cache, `[num_layers, num_slots, bytes of a block in one layer]`, so that neighbouring slots
are one run of bytes. Beside a CUDA cache the memory is pinned: copies are DMA, without a detour.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv.cache import KvCache
from tandem.kv.layout import contiguous_runs
from tandem.types import BlockId


class SwapMemory:
    """`num_slots` slots for blocks of `cache`. Memory that was never written costs nothing, unless it is pinned."""

    def __init__(self, cache: KvCache, num_slots: int) -> None:
        layout = cache.layout
        shape = (layout.num_layers, num_slots, layout.block_layer_bytes)
        self._is_cuda = cache.slab.is_cuda
        self._slots = torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_cuda and num_slots > 0)
        self._blocks = cache.slab.view(layout.num_layers, cache.num_blocks, layout.block_layer_bytes)

    def copy_out(self, blocks: Sequence[BlockId], slots: Sequence[BlockId]) -> None:
        """From the cache into slots, all layers. On return the blocks may be written by anybody."""
        chosen = torch.tensor(blocks, device=self._blocks.device)
        for source, target in zip(self._blocks, self._slots, strict=True):
            rows, at = source.index_select(0, chosen), 0
            for first, count in contiguous_runs(slots):
                target[first : first + count].copy_(rows[at : at + count], non_blocking=self._is_cuda)
                at += count
        if self._is_cuda:
            torch.cuda.current_stream(self._blocks.device).synchronize()

    def copy_in(self, slots: Sequence[BlockId], blocks: Sequence[BlockId]) -> None:
        """From slots into the cache, all layers, before whatever is computed next."""
        for source, target in zip(self._slots, self._blocks, strict=True):
            at = 0
            for first, count in contiguous_runs(slots):
                rows = source[first : first + count].to(target.device, non_blocking=self._is_cuda)
                target.index_copy_(0, torch.tensor(blocks[at : at + count], device=target.device), rows)
                at += count
