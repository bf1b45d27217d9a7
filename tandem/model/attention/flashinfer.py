"""Attention over the paged cache on a GPU with FlashInfer's kernels (Ye et al., arXiv:2501.01005).

The cache's layout is theirs ("HND"). Batches of single tokens go to the decode kernel, others to the prefill kernel;
in a captured decode, the kernel reads its tables from buffers that stay where they are. Planning is tested against
their interface with a reference in place of the kernels; the kernels themselves have never been run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.kv.cache import TORCH_DTYPE
from tandem.kv.layout import KvLayout
from tandem.model.attention.base import AttentionOptions
from tandem.model.attention.page_table import PageTable, page_table
from tandem.model.batch import FlatBatch

WORKSPACE_BYTES = 256 << 20
"""Of all kinds of layers and sizes together: their kernels run one after another."""
_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16",)
_TENSOR_CORE_GROUP = 4
"""Query heads for each KV head from which decode is quicker on tensor cores; sizes without a kernel of their own lie
beyond it or are 3, which has one."""


class Wrapper(Protocol):
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` or `BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(self, *tables: torch.Tensor | int, **options: object) -> None:
        """Tables on the CPU, numbers of heads, head size, block size; then options by name."""

    def run(self, query: torch.Tensor, cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """`query` and `out` `[num_tokens, num_heads, head_dim]`."""


class Wrappers(Protocol):
    """The module `flashinfer`."""

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: torch.Tensor, kv_layout: str) -> Wrapper: ...

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> Wrapper: ...


def why_unfit(layout: KvLayout) -> str | None:
    """Why FlashInfer has no kernel for this cache; None when it has."""
    if layout.dtype not in _DTYPES:
        return f"FlashInfer has no kernels for {layout.dtype}; set model.dtype to bfloat16"
    if layout.head_dim not in _HEAD_DIMS:
        return f"FlashInfer has no kernels for heads of {layout.head_dim}, only of {', '.join(map(str, _HEAD_DIMS))}"
    return None


class FlashInferPlan:
    """One batch, planned."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        """See `AttentionPlan.attend`."""
        self._wrapper.run(query.contiguous(), layer, out=output)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableBuffers:
    """Where the kernels of captured graphs read block tables: int32 on the device, for the largest batch."""

    offsets: torch.Tensor
    blocks: torch.Tensor
    last_fill: torch.Tensor


class FlashInferAttention:
    """Plans batches for one cache layout on one device; kinds of layers each have their own planned wrapper."""

    def __init__(self, layout: KvLayout, num_heads: int, *, device: torch.device, wrappers: Wrappers) -> None:
        """`wrappers`: the module `flashinfer`."""
        self._layout = layout
        self._num_heads = num_heads
        self._device = device
        self._wrappers = wrappers
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._use_tensor_cores = num_heads // layout.num_kv_heads >= _TENSOR_CORE_GROUP
        self._made: dict[tuple[AttentionOptions, bool], Wrapper] = {}

    def plan(self, batch: FlatBatch, options: AttentionOptions) -> FlashInferPlan:
        """See `AttentionBackend.plan`."""
        slices = [(piece.q_end - piece.q_start, piece.kv_length, piece.block_ids.tolist()) for piece in batch.slices]
        table = page_table(slices, self._layout.block_size)
        key = (options, table.is_decode)
        if key not in self._made:
            self._made[key] = self._decode() if table.is_decode else self._prefill()
        self.plan_table(self._made[key], table, options)
        return FlashInferPlan(self._made[key])

    def table_buffers(self, size: int, max_blocks: int) -> TableBuffers:
        """For batches of up to `size` sequences that have `max_blocks` together."""
        offsets, blocks, last_fill = (
            torch.zeros(count, dtype=torch.int32, device=self._device) for count in (size + 1, max_blocks, size)
        )
        return TableBuffers(offsets=offsets, blocks=blocks, last_fill=last_fill)

    def graph_plan(self, size: int, options: AttentionOptions, buffers: TableBuffers) -> GraphPlan:
        """For captured batches of exactly `size` single tokens, whose tables are in `buffers`."""
        wrapper = self._decode(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffers.offsets[: size + 1],
            paged_kv_indices_buffer=buffers.blocks,
            paged_kv_last_page_len_buffer=buffers.last_fill[:size],
        )
        return GraphPlan(self, wrapper, options)

    def _prefill(self) -> Wrapper:
        return self._wrappers.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _decode(self, **buffers: Any) -> Wrapper:
        return self._wrappers.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._use_tensor_cores, **buffers
        )

    def plan_table(self, wrapper: Wrapper, table: PageTable, options: AttentionOptions) -> None:
        """Plans one of our wrappers for a table."""
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


class GraphPlan(FlashInferPlan):
    """What a captured graph launches for one kind of layers; `prepare` says what for before each replay."""

    def __init__(self, attention: FlashInferAttention, wrapper: Wrapper, options: AttentionOptions) -> None:
        super().__init__(wrapper)
        self._attention = attention
        self._options = options

    def prepare(self, table: PageTable) -> None:
        """Fills the buffers, outside of any graph."""
        self._attention.plan_table(self._wrapper, table, self._options)
