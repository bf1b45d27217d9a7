"""One rank's KV cache as tensors: a slab of bytes, seen as one tensor per layer. Owns no decision about blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv.layout import KvLayout, contiguous_runs
from tandem.kv.sharding import Shard, Sharding
from tandem.types import BlockId

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvCache:
    """`layers[i]` is `[num_blocks, 2, num_kv_heads, block_size, head_dim]` in `layout.dtype`, a view of `slab`.

    `slab` is a 1-D uint8 tensor of `layout.slab_bytes(num_blocks)` bytes; a transport that needs its own kind of
    memory (shared, registered) allocates it. `layout` is this rank's; `sharding` says how the worker is cut, and
    `shard` what of the model lies here. Without one, all of it does.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, slab: torch.Tensor, *, sharding: Sharding | None = None, rank: int = 0
    ) -> None:
        expected = layout.slab_bytes(num_blocks)
        if slab.dtype != torch.uint8 or slab.dim() != 1 or slab.numel() != expected:
            raise ValueError(f"slab must be {expected} bytes of uint8, got {slab.dtype} {tuple(slab.shape)}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.slab = slab
        self.sharding = sharding or _whole(layout)
        self.shard: Shard = self.sharding.shard(rank)
        assert (len(self.shard.layers), len(self.shard.heads)) == (layout.num_layers, layout.num_kv_heads)
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.layers = tuple(slab.view(TORCH_DTYPE[layout.dtype]).view(shape).unbind(0))
        self._bytes = slab.view(layout.num_layers, num_blocks * layout.block_layer_bytes)

    def set_aside(self) -> BlockId:
        """Takes the last block out of `num_blocks`, for the engine's own use. Before anybody counts blocks."""
        self.num_blocks -= 1
        return BlockId(self.num_blocks)

    def segments(
        self, layer: int, block_ids: Sequence[BlockId], heads: range | None = None
    ) -> list[torch.Tensor]:
        """The bytes of `block_ids` in one layer as few 1-D uint8 views, in order; neighbours share a view.

        `layer` and `heads` are the model's numbers. Of some of the heads here, there are two views a block, K's and
        V's: bytes come in the same order whatever else the rank holds.
        """
        size = self.layout.block_layer_bytes
        row = self._bytes[layer - self.shard.layers.start]
        if heads is None or heads == self.shard.heads:
            return [row[first * size : (first + count) * size] for first, count in contiguous_runs(block_ids)]
        head_bytes = size // (2 * self.layout.num_kv_heads)
        first, length = (heads.start - self.shard.heads.start) * head_bytes, len(heads) * head_bytes
        planes = (first, first + size // 2)
        return [row[block * size + at : block * size + at + length] for block in block_ids for at in planes]

    def copy_blocks(self, sources: Sequence[BlockId], destinations: Sequence[BlockId]) -> None:
        """Copies whole blocks in all layers; no block is on both sides."""
        device = self.slab.device
        source, destination = torch.tensor(sources, device=device), torch.tensor(destinations, device=device)
        for layer in self.layers:
            layer.index_copy_(0, destination, layer.index_select(0, source))


def _whole(layout: KvLayout) -> Sharding:
    return Sharding(num_layers=layout.num_layers, num_kv_heads=layout.num_kv_heads, block_size=layout.block_size)
