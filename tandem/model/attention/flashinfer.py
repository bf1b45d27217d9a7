"""Attention over the paged cache on a GPU with FlashInfer's kernels (Ye et al., arXiv:2501.01005).

The cache's layout is theirs ("HND"). Batches of single tokens go to the decode kernel, others to the prefill kernel.
Not wired to the executor and never run: no GPU was there. Its planning is tested, its kernels are not.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch

from tandem.kv.cache import TORCH_DTYPE
from tandem.kv.layout import KvLayout
from tandem.model.attention.base import AttentionOptions
from tandem.model.attention.page_table import PageTable, page_table
from tandem.model.batch import FlatBatch

WORKSPACE_BYTES = 128 << 20


class Wrapper(Protocol):
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` or `BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(self, *tables: torch.Tensor | int, **options: object) -> None:
        """Tables on the CPU, numbers of heads, head size, block size; then options by name."""

    def run(self, query: torch.Tensor, cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """`query` and `out` `[num_tokens, num_heads, head_dim]`."""


class Wrappers(Protocol):
    """The module `flashinfer`."""

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: torch.Tensor, kv_layout: str) -> Wrapper: ...

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace: torch.Tensor, kv_layout: str) -> Wrapper: ...


class FlashInferPlan:
    """One batch, planned."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        """See `AttentionPlan.attend`."""
        self._wrapper.run(query.contiguous(), layer, out=output)


class FlashInferAttention:
    """Plans batches for one cache layout on one device; kinds of layers each have their own planned wrapper."""

    def __init__(
        self, layout: KvLayout, num_heads: int, *, device: torch.device, wrappers: Wrappers | None = None
    ) -> None:
        """Raises ImportError where FlashInfer is not installed and no `wrappers` are given."""
        self._layout = layout
        self._num_heads = num_heads
        self._device = device
        self._wrappers: Wrappers = importlib.import_module("flashinfer") if wrappers is None else wrappers
        self._made: dict[tuple[AttentionOptions, bool], Wrapper] = {}

    def plan(self, batch: FlatBatch, options: AttentionOptions) -> FlashInferPlan:
        """See `AttentionBackend.plan`."""
        slices = [(piece.q_end - piece.q_start, piece.kv_length, piece.block_ids.tolist()) for piece in batch.slices]
        table = page_table(slices, self._layout.block_size)
        wrapper = self._wrapper(options, table.is_decode)
        self._plan(wrapper, table, options)
        return FlashInferPlan(wrapper)

    def _wrapper(self, options: AttentionOptions, is_decode: bool) -> Wrapper:
        key = (options, is_decode)
        if key not in self._made:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            of_tokens, of_chunks = (
                self._wrappers.BatchDecodeWithPagedKVCacheWrapper,
                self._wrappers.BatchPrefillWithPagedKVCacheWrapper,
            )
            self._made[key] = (of_tokens if is_decode else of_chunks)(workspace, "HND")
        return self._made[key]

    def _plan(self, wrapper: Wrapper, table: PageTable, options: AttentionOptions) -> None:
        layout, dtype = self._layout, TORCH_DTYPE[self._layout.dtype]
        tables = [torch.tensor(part, dtype=torch.int32) for part in (table.offsets, table.blocks, table.last_fill)]
        if not table.is_decode:
            tables.insert(0, torch.tensor(table.q_offsets, dtype=torch.int32))
        wrapper.plan(
            *tables,
            self._num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            sm_scale=options.scale,
            window_left=-1 if options.window is None else options.window - 1,
            logits_soft_cap=options.softcap or 0.0,
            q_data_type=dtype,
            kv_data_type=dtype,
            **({} if table.is_decode else {"causal": True}),
        )
