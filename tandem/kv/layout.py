"""The shape of KV in memory: what one block is, in tokens and bytes, and where a (layer, block) lies. Pure.

Per layer `[num_blocks, 2, num_kv_heads, block_size, head_dim]` (K is 0, V is 1), all layers in one slab one after
another. A KV-head range of a block is one contiguous slice for K and one for V; neighbouring blocks of one layer
are contiguous, so a run of blocks travels as one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.types import BlockId

Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
PAYLOAD_DIGEST = "xxh3-64 of quarters"
"""The function of `payload_digest`. Another one needs another name: who digests otherwise must not be paired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """The KV cache of one worker."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: Dtype

    @property
    def block_layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, all layers (K_tok of the cost model)."""
        return self.num_layers * self.block_layer_bytes // self.block_size

    def slab_bytes(self, num_blocks: int) -> int:
        """Bytes of a cache of `num_blocks` blocks."""
        return self.num_layers * num_blocks * self.block_layer_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def contiguous_runs(block_ids: Sequence[BlockId]) -> list[tuple[BlockId, int]]:
    """Splits a block table into maximal runs of neighbouring blocks, in order: [(first block, count), ...]."""
    runs: list[tuple[BlockId, int]] = []
    for block_id in block_ids:
        if runs and runs[-1][0] + runs[-1][1] == block_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return runs
