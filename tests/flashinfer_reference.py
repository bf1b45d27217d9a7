"""FlashInfer's two wrappers as a reference on the CPU: the same calls and rules, attention written out from the tables.

The rules are those of flashinfer-python 0.7: a wrapper for graphs keeps the buffers and the batch size it was made
with, `plan` copies tables into them, and `run` reads the buffers, never what `plan` was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Reference:
    """One wrapper. `num_plans` counts calls."""

    def __init__(self, kv_layout: str, buffers: Sequence[torch.Tensor] | None = None) -> None:
        assert kv_layout == "HND"
        self._buffers = buffers
        self._tables: Sequence[torch.Tensor] = ()
        self._q_offsets = torch.zeros(0)
        self.num_plans = 0

    def plan(self, *arguments: Any, **options: Any) -> None:
        is_prefill = len(arguments) == 8
        tables = arguments[is_prefill : 3 + is_prefill]
        self.num_heads, self.num_kv_heads, self.head_dim, self.block_size = arguments[3 + is_prefill :]
        assert all(table.dtype == torch.int32 and table.device.type == "cpu" for table in arguments[: 3 + is_prefill])
        assert options.pop("causal", False) is is_prefill
        self._scale, self._window = options.pop("sm_scale"), options.pop("window_left")
        self._softcap, self._dtype = options.pop("logits_soft_cap"), options.pop("q_data_type")
        assert options.pop("kv_data_type") == self._dtype
        assert not options
        self._q_offsets = arguments[0] if is_prefill else torch.arange(len(tables[2]) + 1)
        self._tables = tables if self._buffers is None else self._copied(tables)
        self.num_plans += 1

    def _copied(self, tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert self._buffers is not None
        offsets, blocks, last_fill = self._buffers
        assert len(tables[2]) == len(last_fill), "the batch size of a captured wrapper is fixed"
        assert len(tables[1]) <= len(blocks), "more blocks than the buffer has room for"
        offsets.copy_(tables[0])
        blocks[: len(tables[1])].copy_(tables[1])
        last_fill.copy_(tables[2])
        return self._buffers

    def run(self, query: torch.Tensor, cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        assert query.is_contiguous()
        assert query.dtype == cache.dtype == self._dtype
        offsets, blocks, last_fill = (table.long() for table in self._tables)
        for index in range(len(last_fill)):
            of_slice = blocks[offsets[index] : offsets[index + 1]]
            length = (len(of_slice) - 1) * self.block_size + int(last_fill[index])
            keys, values = cache[of_slice].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            tokens = slice(int(self._q_offsets[index]), int(self._q_offsets[index + 1]))
            out[tokens] = self._attend(query[tokens], keys, values)
        return out

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`query` `[num_tokens, num_heads, head_dim]`, the last tokens of `keys` `[num_kv_heads, length, head_dim]`."""
        group, length = self.num_heads // self.num_kv_heads, keys.shape[1]
        keys, values = (each.repeat_interleave(group, dim=0).float() for each in (keys, values))
        scores = query.transpose(0, 1).float() @ keys.transpose(1, 2) * self._scale
        if self._softcap > 0:
            scores = (scores / self._softcap).tanh() * self._softcap
        ages = torch.arange(length - len(query), length).unsqueeze(1) - torch.arange(length)
        hidden = (ages < 0) | ((ages > self._window) if self._window >= 0 else torch.tensor(False))
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (shares @ values).transpose(0, 1).to(query.dtype)


class ReferenceFlashInfer:
    """The module. `captured` are the wrappers made for graphs, by batch size."""

    def __init__(self) -> None:
        self.captured: dict[int, list[Reference]] = {}

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: torch.Tensor, kv_layout: str) -> Reference:
        return Reference(kv_layout)

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
    ) -> Reference:
        if not use_cuda_graph:
            return Reference(kv_layout)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        given = [buffer for buffer in buffers if buffer is not None]
        assert [buffer.dtype for buffer in given] == [torch.int32] * 3
        assert len(given[0]) == len(given[2]) + 1
        made = Reference(kv_layout, given)
        self.captured.setdefault(len(given[2]), []).append(made)
        return made
