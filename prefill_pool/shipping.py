"""What of a prompt's KV a chunk completes, and what the choice of layers in a message depends on. Pure.

The same for a live worker and a simulated one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.sizing import Chunk as SizedChunk
from prefill_pool.scheduler import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class KvShare:
    """What a rank has of each block."""

    num_layers: int
    block_size: int
    """Tokens."""
    block_layer_bytes: float
    """Of one block in one layer."""


def blocks_after(chunk: Chunk, block_size: int) -> int:
    """Leading blocks of the prompt whose KV is complete after a chunk; its last one may be partly filled."""
    end = chunk.start + chunk.num_tokens
    return -(-end // block_size) if chunk.is_last else end // block_size


def sized_chunk(chunk: Chunk, share: KvShare, *, num_blocks: int, token_s: float, layer_s: float) -> SizedChunk:
    """A chunk that completes `num_blocks` blocks; a layer of its batch takes `layer_s`, a token alone `token_s`."""
    num_tokens = len(chunk.request.prompt_token_ids)
    num_later_tokens = num_tokens - chunk.start - chunk.num_tokens
    num_later_blocks = -(-num_tokens // share.block_size) - blocks_after(chunk, share.block_size)
    return SizedChunk(
        num_layers=share.num_layers,
        layer_bytes=round(num_blocks * share.block_layer_bytes),
        layer_s=layer_s,
        later_s=token_s * num_later_tokens,
        later_bytes=round(num_later_blocks * share.num_layers * share.block_layer_bytes),
    )
