"""The KV cache as tensors: one slab of bytes, seen as one tensor per layer. Owns no decision about blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv.layout import KvLayout, contiguous_runs
from tandem.types import BlockId

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvCache:
    """`layers[i]` is `[num_blocks, 2, num_kv_heads, block_size, head_dim]` in `layout.dtype`, a view of `slab`.

    `slab` is a 1-D uint8 tensor of `layout.slab_bytes(num_blocks)` bytes; a transport that needs its own kind of
    memory (shared, registered) allocates it.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, slab: torch.Tensor) -> None:
        expected = layout.slab_bytes(num_blocks)
        if slab.dtype != torch.uint8 or slab.dim() != 1 or slab.numel() != expected:
            raise ValueError(f"slab must be {expected} bytes of uint8, got {slab.dtype} {tuple(slab.shape)}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.slab = slab
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.layers = tuple(slab.view(TORCH_DTYPE[layout.dtype]).view(shape).unbind(0))
        self._bytes = slab.view(layout.num_layers, num_blocks * layout.block_layer_bytes)

    def segments(self, layer: int, block_ids: Sequence[BlockId]) -> list[torch.Tensor]:
        """The bytes of `block_ids` in one layer as few 1-D uint8 views, in order; neighbours share a view."""
        size = self.layout.block_layer_bytes
        row = self._bytes[layer]
        return [row[first * size : (first + count) * size] for first, count in contiguous_runs(block_ids)]

    def copy_blocks(self, sources: Sequence[BlockId], destinations: Sequence[BlockId]) -> None:
        """Copies whole blocks in all layers; no block is on both sides."""
        source, destination = torch.tensor(sources), torch.tensor(destinations)
        for layer in self.layers:
            layer.index_copy_(0, destination, layer.index_select(0, source))
