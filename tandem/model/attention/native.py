"""Attention over the paged cache with kernels of our own: nothing is gathered, and no mask is made."""

from __future__ import annotations

import torch

from tandem.kv.layout import KvLayout
from tandem.model.attention.base import AttentionOptions
from tandem.model.batch import FlatBatch
from tandem.model.native import Kernels


class NativeAttentionPlan:
    """The batch's slices and block tables as the kernels read them."""

    def __init__(self, kernels: Kernels, batch: FlatBatch, layout: KvLayout, options: AttentionOptions) -> None:
        self._kernels = kernels
        self._layout = layout
        self._options = options
        self._num_slices = len(batch.slices)
        rows, start = [], 0
        for piece in batch.slices:
            rows.append((piece.q_start, piece.q_end - piece.q_start, piece.kv_length, start))
            start += len(piece.block_ids)
        self._slices = torch.tensor(rows, dtype=torch.int64)
        self._tables = torch.cat([piece.block_ids for piece in batch.slices])

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        """See `AttentionPlan.attend`."""
        layout, options = self._layout, self._options
        assert query.stride()[1:] == (layout.head_dim, 1)
        self._kernels.attend(
            query.data_ptr(),
            query.stride(0),
            layer.data_ptr(),
            output.data_ptr(),
            self._slices.data_ptr(),
            self._tables.data_ptr(),
            self._num_slices,
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
        self._layout = layout

    def plan(self, batch: FlatBatch, options: AttentionOptions) -> NativeAttentionPlan:
        """See `AttentionBackend.plan`."""
        return NativeAttentionPlan(self._kernels, batch, self._layout, options)
