"""One iteration's batch as tensors: built once, read by every layer.

The tokens of all slices lie one after another in one flat batch; a slice is the range `q_start:q_end` of it, with
`kv_length` tokens of context once its own are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.kv.layout import KvLayout
from tandem.model.device_io import Put, stay
from tandem.model.executor import SequenceSlice
from tandem.model.rope import RotaryFrequencies, RotaryTables, rotary_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRange:
    """Where one slice lies. `block_ids` is cut to the blocks that `kv_length` tokens need."""

    q_start: int
    q_end: int
    kv_length: int
    block_ids: torch.Tensor

    @property
    def num_computed(self) -> int:
        """Context tokens that were in the cache before."""
        return self.kv_length - (self.q_end - self.q_start)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatBatch:
    """The whole batch, on the device that computes. `kv_rows` and what attention builds index a layer seen as rows of
    `head_dim` numbers; `slices` stay on the host, where attention is planned.
    """

    token_ids: torch.Tensor
    """`[num_tokens]` int64"""
    slices: tuple[SliceRange, ...]
    rotary: tuple[RotaryTables, ...]
    """One for each of the model's kinds of positions."""
    kv_rows: torch.Tensor
    """`[num_tokens * 2 * num_kv_heads]` int64: where each token's K heads, then its V heads go."""


def cache_rows(layout: KvLayout, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Row of (block, K or V, head, offset) for tokens at `blocks`, `offsets` `[n]`: `[n, 2 * num_kv_heads]`."""
    planes = torch.arange(2 * layout.num_kv_heads, device=blocks.device)
    first = blocks.unsqueeze(1) * (2 * layout.num_kv_heads) + planes
    return first * layout.block_size + offsets.unsqueeze(1)


def context_rows(layout: KvLayout, block_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of context `positions` `[n]` of a sequence in attention's order: `[2 * num_kv_heads, n]`."""
    blocks = block_ids[positions // layout.block_size]
    return cache_rows(layout, blocks, positions % layout.block_size).t()


def _range(piece: SequenceSlice, q_start: int, layout: KvLayout) -> SliceRange:
    num_tokens = len(piece.token_ids)
    kv_length = piece.num_computed + num_tokens
    num_blocks = layout.num_blocks_for(kv_length)
    assert num_tokens > 0
    assert len(piece.block_ids) >= num_blocks
    blocks = torch.tensor(piece.block_ids[:num_blocks], dtype=torch.int64)
    return SliceRange(q_start=q_start, q_end=q_start + num_tokens, kv_length=kv_length, block_ids=blocks)


def build_batch(
    pieces: Sequence[SequenceSlice],
    layout: KvLayout,
    frequencies: Sequence[RotaryFrequencies],
    *,
    put: Put = stay,
) -> FlatBatch:
    """Lays the slices out in their order, on the host, and puts them where `frequencies` are."""
    slices: list[SliceRange] = []
    for piece in pieces:
        slices.append(_range(piece, slices[-1].q_end if slices else 0, layout))
    positions = torch.cat([torch.arange(s.num_computed, s.kv_length) for s in slices])
    size = layout.block_size
    blocks = torch.cat([s.block_ids[torch.arange(s.num_computed, s.kv_length) // size] for s in slices])
    rows = cache_rows(layout, blocks, positions % size).reshape(-1)
    there = put(positions)
    return FlatBatch(
        token_ids=put(torch.tensor([token for piece in pieces for token in piece.token_ids], dtype=torch.int64)),
        slices=tuple(slices),
        rotary=tuple(rotary_tables(there, each) for each in frequencies),
        kv_rows=put(rows),
    )
