"""Copies whole blocks between a worker's cache and the slots of a host tier, one layer or all of them at a time.

In the cache a block's layers lie apart, in a slot one after another. Each call is a few tensor operations, however many
blocks it is for, so that the engine's thread gets the interpreter between them. Owns no memory but that of one layer.
One thread may load while another stores; on a GPU, both beside what it computes (`copy_stream.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv.cache import KvCache
from tandem.kv.copy_stream import CopyChannel, channels
from tandem.types import BlockId


class BlockCopies:
    """Between `cache` and slabs on the host, uint8 `[num_slots, bytes of a block in all layers]`."""

    def __init__(self, cache: KvCache, ways: Sequence[CopyChannel] | None = None) -> None:
        """`ways`, for loads and for stores, are those of the cache's device unless given."""
        layout = cache.layout
        self._load, self._store = channels(cache.slab.device, 2) if ways is None else ways
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
        rows = self._rows(slab, layer).index_select(0, torch.tensor(slots))
        with self._load.copying(after_compute=layer == 0):  # iterations before this one may have used the blocks
            self._layers[layer].index_copy_(0, self._load.up(torch.tensor(blocks)), self._load.up(rows))

    def store(self, slab: torch.Tensor, *, slots: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """From the cache into slots, all layers."""
        chosen = torch.tensor(slots)
        with self._store.copying(after_compute=True):
            wanted = self._store.up(torch.tensor(blocks))
            for layer, source in enumerate(self._layers):
                rows = self._store.down(source.index_select(0, wanted))
                self._rows(slab, layer).index_copy_(0, chosen, rows)

    def _rows(self, slab: torch.Tensor, layer: int) -> torch.Tensor:
        return slab.view(torch.int64)[:, layer * self._size : (layer + 1) * self._size]
