"""Copies whole blocks between a worker's cache and the slots of a host tier, one layer or all of them at a time.

In the cache a block's layers lie apart, in a slot one after another. Each call is a few tensor operations, however many
blocks it is for, so that the engine's thread gets the interpreter between them. Owns no memory but that of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv.cache import KvCache
from tandem.types import BlockId


class BlockCopies:
    """Between `cache` and slabs of uint8 `[num_slots, bytes of a block in all layers]`."""

    def __init__(self, cache: KvCache) -> None:
        layout = cache.layout
        self._num_layers = layout.num_layers
        self._size = layout.block_layer_bytes // 8
        """Of a block in one layer, in words of 8 bytes."""
        self._layers = cache.slab.view(torch.int64).view(layout.num_layers, -1, self._size).unbind(0)

    @property
    def block_bytes(self) -> int:
        """Of a block in all layers."""
        return 8 * self._size * self._num_layers

    @property
    def num_layers(self) -> int:
        """Layers of a block."""
        return self._num_layers

    def load_layer(
        self, layer: int, slab: torch.Tensor, *, slots: Sequence[int], blocks: Sequence[BlockId]
    ) -> None:
        """From slots into the cache."""
        target = self._layers[layer]
        rows = self._rows(slab, layer).index_select(0, torch.tensor(slots, device=slab.device))
        target.index_copy_(0, torch.tensor(blocks, device=target.device), rows.to(target.device))

    def store(self, slab: torch.Tensor, *, slots: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """From the cache into slots, all layers."""
        chosen = torch.tensor(slots, device=slab.device)
        for layer, source in enumerate(self._layers):
            rows = source.index_select(0, torch.tensor(blocks, device=source.device))
            self._rows(slab, layer).index_copy_(0, chosen, rows.to(slab.device))

    def _rows(self, slab: torch.Tensor, layer: int) -> torch.Tensor:
        return slab.view(torch.int64)[:, layer * self._size : (layer + 1) * self._size]
