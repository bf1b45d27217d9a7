"""Attention over the paged cache with kernels of our own: nothing is gathered, and no mask is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kv.layout import KvLayout
from tandem.model.attention.base import AttentionOptions
from tandem.model.batch import FlatBatch
from tandem.model.native import Kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """A batch's slices and block tables as the kernels read them."""

    num_slices: int
    slices: torch.Tensor
    """`[num_slices, 4]` int64: first token, tokens, context length, start in `tables`."""
    tables: torch.Tensor
    """int64: the block ids of all slices."""


class NativeAttentionPlan:
    """One batch, for layers of one kind."""

    def __init__(self, kernels: Kernels, pages: Pages, layout: KvLayout, options: AttentionOptions) -> None:
        self._kernels = kernels
        self._layout = layout
        self._options = options
        self._pages = pages

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        """See `AttentionPlan.attend`."""
        layout, options = self._layout, self._options
        assert query.stride()[1:] == (layout.head_dim, 1)
        self._kernels.attend(
            query.data_ptr(),
            query.stride(0),
            layer.data_ptr(),
            output.data_ptr(),
            self._pages.slices.data_ptr(),
            self._pages.tables.data_ptr(),
            self._pages.num_slices,
            query.shape[1],
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            options.scale,
            options.softcap or 0.0,
            options.window or 0,
            layout.dtype == "bfloat16",
            torch.get_num_threads(),
        )


class NativeAttention:
    """Plans batches for one cache layout."""

    def __init__(self, kernels: Kernels, layout: KvLayout) -> None:
        self._kernels = kernels
        self.layout = layout

    def pages(self, batch: FlatBatch) -> Pages:
        """What does not depend on the layer."""
        rows, start = [], 0
        for piece in batch.slices:
            rows.append((piece.q_start, piece.q_end - piece.q_start, piece.kv_length, start))
            start += len(piece.block_ids)
        return Pages(
            num_slices=len(rows),
            slices=torch.tensor(rows, dtype=torch.int64),
            tables=torch.cat([piece.block_ids for piece in batch.slices]),
        )

    def plan(self, batch: FlatBatch, options: AttentionOptions) -> NativeAttentionPlan:
        """See `AttentionBackend.plan`."""
        return NativeAttentionPlan(self._kernels, self.pages(batch), self.layout, options)
