"""Decode iterations as graphs: inputs and tables go into buffers that stay where they are, then a graph is replayed.

The graph runs the same decoder as every other iteration, from token ids to logits. Sampling is outside of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

import torch

from tandem.kv.cache import KvCache
from tandem.model.attention.base import AttentionOptions
from tandem.model.attention.flashinfer import FlashInferAttention, GraphPlan
from tandem.model.attention.page_table import PageTable
from tandem.model.batch import FlatBatch, cache_rows
from tandem.model.cuda_graphs import Capturer, GraphLadder
from tandem.model.decode_inputs import DecodeInputs, decode_inputs, ladder, rung_for
from tandem.model.decoder import Decoder
from tandem.model.device_io import DeviceIo
from tandem.model.executor import SequenceSlice
from tandem.model.rope import RotaryFrequencies, rotary_tables
from tandem.model.spec import ModelSpec
from tandem.types import BlockId

logger = logging.getLogger(__name__)

_NUM_INPUTS = 3
"""Token ids, positions and blocks."""


class GraphedDecode:
    """Up to `largest` sequences at once. Takes one block of `cache` for padded rows."""

    def __init__(
        self,
        model: Decoder,
        spec: ModelSpec,
        cache: KvCache,
        *,
        attention: FlashInferAttention,
        io: DeviceIo,
        frequencies: Sequence[RotaryFrequencies],
    ) -> None:
        self._model = model
        self._spec = spec
        self._cache = cache
        self._attention = attention
        self._io = io
        self._frequencies = frequencies
        self._plans: dict[int, dict[AttentionOptions, GraphPlan]] = {}

    def open(self, largest: int, capturer: Capturer) -> None:
        """Makes the buffers, and captures all sizes, the largest first. Before any block is in use."""
        self._spare: BlockId = self._cache.set_aside()
        layout = self._cache.layout
        num_tokens = min(self._spec.max_context_tokens, self._cache.num_blocks * layout.block_size)
        self._tables = self._attention.table_buffers(largest, largest * layout.num_blocks_for(num_tokens))
        self._inputs = torch.zeros(_NUM_INPUTS * largest, dtype=torch.int64, device=self._io.device)
        self._logits = torch.zeros(largest, self._spec.vocab_size, dtype=torch.float32, device=self._io.device)
        self._ladder = GraphLadder(self._run, ladder(largest), capturer)
        for size in reversed(self._ladder.sizes):
            self._replay(decode_inputs((), size, block_size=layout.block_size, spare_block=self._spare), size)
            self._io.finish()
        logger.info("decode of up to %d sequences runs as %d CUDA graphs", largest, self._ladder.num_captured)

    @property
    def largest(self) -> int:
        """Most sequences that are replayed together."""
        return self._ladder.sizes[-1]

    def logits(self, batch: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Logits of each slice with choices, in order, `[num_sampled, vocab]` fp32, valid until the next call.

        None when the batch is not one of single tokens, or too large.
        """
        size = rung_for(self._ladder.sizes, batch)
        if size is None:
            return None
        block_size = self._cache.layout.block_size
        self._replay(decode_inputs(batch, size, block_size=block_size, spare_block=self._spare), size)
        sampled = [row for row, piece in enumerate(batch) if piece.choices]
        if len(sampled) == len(batch):
            return self._logits[: len(batch)]
        return self._logits.index_select(0, self._io.put(torch.tensor(sampled, dtype=torch.int64)))

    def _replay(self, inputs: DecodeInputs, size: int) -> None:
        rows = torch.tensor([*chain(inputs.token_ids, inputs.positions, inputs.blocks)], dtype=torch.int64)
        self._inputs[: len(rows)].copy_(self._io.put(rows))
        self._prepare(inputs.table, size)
        self._ladder.replay(size)

    def _prepare(self, table: PageTable, size: int) -> None:
        if size not in self._plans:
            kinds = self._model.kinds
            self._plans[size] = {kind: self._attention.graph_plan(size, kind, self._tables) for kind in kinds}
        for plan in self._plans[size].values():
            plan.prepare(table)

    def _run(self, size: int) -> None:
        """What is captured."""
        token_ids, positions, blocks = self._inputs[: _NUM_INPUTS * size].view(_NUM_INPUTS, size).unbind(0)
        layout = self._cache.layout
        flat = FlatBatch(
            token_ids=token_ids,
            slices=(),
            rotary=tuple(rotary_tables(positions, each) for each in self._frequencies),
            kv_rows=cache_rows(layout, blocks, positions % layout.block_size).reshape(-1),
        )
        hidden = self._model.run_planned(flat, self._plans[size])
        self._logits[:size].copy_(self._model.logits(hidden))
