"""Attention over the paged cache with torch's own fused kernel; runs on every CPU and every GPU.

Slices of several tokens go one by one: their cost is arithmetic. Slices of one token go together in padded tiles,
one gather and one kernel call each, the query heads of a KV head standing as rows: their cost is overhead where
contexts are short, and memory where they are long, so a tile is as large as the processor's cache takes.
Indices and masks are made on the host and put on the device.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem.kv.cache import TORCH_DTYPE
from tandem.kv.layout import KvLayout
from tandem.model.attention.base import AttentionOptions
from tandem.model.attention.scores import capped_attention
from tandem.model.batch import FlatBatch, SliceRange, context_rows
from tandem.model.device_io import DeviceIo, HostIo, Put

_CPU_TILE_BYTES, _GPU_TILE_BYTES = 4 << 20, 256 << 20
"""Padded KV of a layer in one call; of a GPU, what may be taken beside the cache."""


def _gathered(layer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`layer` `[num_blocks, 2, num_kv_heads, block_size, head_dim]` at `rows` `[...]`: `[..., head_dim]`."""
    head_dim = layer.shape[-1]
    return layer.view(-1, head_dim).index_select(0, rows.reshape(-1)).view(*rows.shape, head_dim)


def _window_start(position: int, options: AttentionOptions) -> int:
    """First context position that a token at `position` attends to."""
    return 0 if options.window is None else max(0, position - options.window + 1)


def _chunk_mask(
    piece: SliceRange, start: int, dtype: torch.dtype, options: AttentionOptions
) -> torch.Tensor | None:
    """What each of the slice's tokens may see from position `start` on; None where the kernel's own mask says it."""
    length, num_before = piece.kv_length - start, piece.num_computed - start
    window = length if options.window is None else options.window
    if not num_before and window >= length and options.softcap is None:
        return None
    shape = (piece.q_end - piece.q_start, length)
    mask = torch.full(shape, float("-inf"), dtype=dtype).triu_(num_before + 1)
    if window < length:
        mask.masked_fill_(torch.ones(shape, dtype=torch.bool).tril_(num_before - window), float("-inf"))
    return mask


class _ChunkPlan:
    """One slice of several tokens."""

    def __init__(
        self, piece: SliceRange, layout: KvLayout, dtype: torch.dtype, *, options: AttentionOptions, put: Put
    ) -> None:
        self._tokens = slice(piece.q_start, piece.q_end)
        self._options = options
        self._num_kv_heads = layout.num_kv_heads
        start = _window_start(piece.num_computed, options)
        length = piece.kv_length - start
        rows = context_rows(layout, piece.block_ids, torch.arange(start, piece.kv_length))
        self._rows = put(rows.reshape(2, 1, layout.num_kv_heads, length))
        mask = _chunk_mask(piece, start, dtype, options)
        self._mask = None if mask is None else put(mask)

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        keys, values = _gathered(layer, self._rows).unbind(0)
        heads = query[self._tokens].transpose(0, 1).unsqueeze(0)
        if self._options.softcap is not None:
            attended = self._capped(heads, keys, values)
        else:
            attended = functional.scaled_dot_product_attention(
                heads,
                keys,
                values,
                attn_mask=self._mask,
                is_causal=self._mask is None,
                scale=self._options.scale,
                enable_gqa=True,
            )
        output[self._tokens] = attended.squeeze(0).transpose(0, 1)

    def _capped(self, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        assert self._mask is not None
        grouped = heads.view(1, self._num_kv_heads, -1, *heads.shape[2:])
        return capped_attention(grouped, keys, values, self._mask.unsqueeze(0), self._options).flatten(1, 2)


class _TokensPlan:
    """Several slices of one token, longest first."""

    def __init__(
        self, pieces: list[SliceRange], layout: KvLayout, dtype: torch.dtype, *, options: AttentionOptions, put: Put
    ) -> None:
        self._options = options
        starts = torch.tensor([_window_start(piece.kv_length - 1, options) for piece in pieces])
        lengths = torch.tensor([piece.kv_length for piece in pieces]) - starts
        longest = int(lengths.max())
        tables = torch.nn.utils.rnn.pad_sequence([piece.block_ids for piece in pieces], batch_first=True)
        # A padded place reads the sequence's own first token there, so that it reads nothing that could be NaN or Inf.
        offsets = torch.arange(longest)
        positions = offsets.where(offsets < lengths.unsqueeze(1), 0) + starts.unsqueeze(1)
        blocks = tables.gather(1, positions // layout.block_size)
        planes = torch.arange(2 * layout.num_kv_heads).view(2, 1, -1, 1)
        rows = (blocks[:, None] * (2 * layout.num_kv_heads) + planes) * layout.block_size
        rows = rows + (positions % layout.block_size)[:, None]
        self._rows = put(rows.contiguous())  # [2, num_pieces, num_kv_heads, longest]
        self._tokens = put(torch.tensor([piece.q_start for piece in pieces]))
        past_end = offsets >= lengths.view(-1, 1, 1, 1)
        self._mask = put(torch.zeros(past_end.shape, dtype=dtype).masked_fill_(past_end, float("-inf")))
        self._num_kv_heads = layout.num_kv_heads

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        keys, values = _gathered(layer, self._rows).unbind(0)
        tokens = query.index_select(0, self._tokens)
        grouped = tokens.view(len(tokens), self._num_kv_heads, -1, tokens.shape[-1])
        if self._options.softcap is not None:
            attended = capped_attention(grouped.unsqueeze(3), keys, values, self._mask[:, 0], self._options)
        else:
            attended = functional.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=self._mask, scale=self._options.scale
            )
        output.index_copy_(0, self._tokens, attended.reshape(tokens.shape))


def _tiles(
    pieces: list[SliceRange], layout: KvLayout, options: AttentionOptions, tile_bytes: int
) -> list[list[SliceRange]]:
    """Groups slices of one token so that the padded KV of a group stays in the cache between gather and kernel."""
    token_bytes = layout.token_bytes // layout.num_layers
    tiles: list[list[SliceRange]] = []
    longest = 0
    for piece in sorted(pieces, key=lambda p: -p.kv_length):
        if tiles and (len(tiles[-1]) + 1) * longest * token_bytes <= tile_bytes:
            tiles[-1].append(piece)
        else:
            tiles.append([piece])
            longest = piece.kv_length - _window_start(piece.kv_length - 1, options)
    return tiles


class TorchAttentionPlan:
    """One batch: its chunks, and its single tokens as one piece of work."""

    def __init__(self, batch: FlatBatch, layout: KvLayout, io: DeviceIo, options: AttentionOptions) -> None:
        dtype = TORCH_DTYPE[layout.dtype]
        single = [piece for piece in batch.slices if piece.q_end - piece.q_start == 1]
        chunks = [piece for piece in batch.slices if piece.q_end - piece.q_start > 1]
        self._parts: list[_ChunkPlan | _TokensPlan] = [
            _ChunkPlan(piece, layout, dtype, options=options, put=io.put) for piece in chunks
        ]
        tiles = _tiles(single, layout, options, _CPU_TILE_BYTES if io.device.type == "cpu" else _GPU_TILE_BYTES)
        self._parts += [_TokensPlan(tile, layout, dtype, options=options, put=io.put) for tile in tiles]

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        """See `AttentionPlan.attend`."""
        for part in self._parts:
            part.attend(query, layer, output)


class TorchAttention:
    """Plans batches for one cache layout on one device."""

    def __init__(self, layout: KvLayout, io: DeviceIo | None = None) -> None:
        self._layout = layout
        self._io = io or HostIo()

    def plan(self, batch: FlatBatch, options: AttentionOptions) -> TorchAttentionPlan:
        """See `AttentionBackend.plan`."""
        return TorchAttentionPlan(batch, self._layout, self._io, options)
