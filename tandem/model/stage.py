"""One rank's share of an iteration: its layers over the batch, and its part of the logits, brought to rank 0.

A worker of one rank is the case with no one else: then nothing is sent anywhere. All ranks run the same batches in the
same order; what they exchange follows from the batch alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from tandem.kv.cache import TORCH_DTYPE, KvCache
from tandem.model.attention.choose import ChosenAttention, choose_attention
from tandem.model.attention.flashinfer import FlashInferAttention
from tandem.model.batch import FlatBatch, build_batch
from tandem.model.collectives import Collectives
from tandem.model.cuda_graphs import Capturer
from tandem.model.decode_inputs import LARGEST
from tandem.model.decoder import Decoder
from tandem.model.device_io import DeviceIo, io_for
from tandem.model.devices import device_name
from tandem.model.executor import LayerHook, SequenceSlice
from tandem.model.graphed_decode import GraphedDecode
from tandem.model.micro_batch import micro_batches
from tandem.model.parallel import ModelShard
from tandem.model.weights import Weights

logger = logging.getLogger(__name__)

SCORED_ROWS = 64
"""Prompt tokens whose logits are held at once: a row is as wide as the vocabulary."""


def row_groups(batch: Sequence[SequenceSlice]) -> list[range | list[int]]:
    """Tokens of the flat batch whose logits are wanted: all that are sampled after, then scored ones, a few at once."""
    sampled: list[int] = []
    scored: list[range] = []
    start = 0
    for piece in batch:
        if piece.choices:
            sampled.append(start + len(piece.token_ids) - 1)
        end = start + (len(piece.scoring.targets) if piece.scoring else 0)
        scored += [range(first, min(end, first + SCORED_ROWS)) for first in range(start, end, SCORED_ROWS)]
        start += len(piece.token_ids)
    return [sampled, *scored]


class Stage:
    """Not thread-safe: one engine thread drives it. `collectives` is needed where there are other ranks.

    It computes where `cache` lies, with the kernels that are best there, or with those of `attention`.
    """

    def __init__(
        self,
        shard: ModelShard,
        weights: Weights,
        cache: KvCache,
        *,
        collectives: Collectives | None = None,
        attention: ChosenAttention | None = None,
    ) -> None:
        self.shard = shard
        self.cache = cache
        self.collectives = collectives
        self._frequencies = weights.frequencies
        self._dtype = TORCH_DTYPE[cache.layout.dtype]
        self.io: DeviceIo = io_for(cache.slab.device)
        chosen = attention or choose_attention(shard.local, cache, self.io)
        self.kernels = chosen.name
        self.attention = chosen.backend
        self.graphs: GraphedDecode | None = None
        stage = None if shard.tp == 1 else self
        self.model = Decoder(shard.local, weights, cache, self.attention, stage=stage)

    @property
    def compute(self) -> str:
        """Device, precision and kernels, for people."""
        graphs = "" if self.graphs is None else f", CUDA graphs up to {self.graphs.largest} sequences"
        return f"{device_name(self.io.device)}, {self.cache.layout.dtype}, attention {self.kernels}{graphs}"

    @torch.inference_mode()
    def use_graphs(self, largest: int, capturer: Capturer) -> bool:
        """Decode of up to `largest` sequences runs as captured graphs from now on, where this rank can; whether it can.

        Call it before any block is in use: it takes one of the cache.
        """
        why_not = self._why_no_graphs()
        if why_not is not None:
            logger.info("decode runs without CUDA graphs: %s", why_not)
            return False
        assert isinstance(self.attention, FlashInferAttention)
        graphs = GraphedDecode(
            self.model,
            self.shard.local,
            self.cache,
            attention=self.attention,
            io=self.io,
            frequencies=self._frequencies,
        )
        with self.io.current():
            graphs.open(min(largest, LARGEST), capturer)
        self.graphs = graphs
        return True

    def _why_no_graphs(self) -> str | None:
        if not isinstance(self.attention, FlashInferAttention):
            return f"attention is {self.kernels}'s, which plans anew for each batch"
        if self.shard.tp * self.shard.pp > 1:
            return "other ranks hold parts of the model"
        if any(layer.has_experts for layer in self.shard.spec.layers):
            return "which experts run is decided on the host"
        return None

    @property
    def first_token_id(self) -> int:
        """See `TensorStage`."""
        return self.shard.vocabulary.start

    def all_reduce(self, x: torch.Tensor) -> None:
        """See `TensorStage`."""
        self._others.all_reduce(x)

    @property
    def _others(self) -> Collectives:
        assert self.collectives is not None, "there are other ranks"
        return self.collectives

    @torch.inference_mode()
    def run(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> Iterator[torch.Tensor]:
        """Runs one iteration. On rank 0, yields the logits of each of `row_groups`, `[num_rows, vocab]` fp32.

        Other ranks yield empty tensors. Exhaust it, or the ranks are out of step.
        """
        with self.io.current():
            replayed = None
            if self.graphs is not None and on_layer is None and before_layer is None:
                replayed = self.graphs.logits(batch)
            if replayed is not None:
                yield replayed
            else:
                hidden = self._hidden(batch, on_layer, before_layer)
                for rows in row_groups(batch):
                    yield self._logits(hidden, rows)
            self.io.finish()

    def _hidden(
        self, batch: Sequence[SequenceSlice], on_layer: LayerHook | None, before_layer: LayerHook | None
    ) -> torch.Tensor | None:
        """What the last layer made of each token, in the last stage."""
        if self.shard.pp == 1:
            return self.model.forward(self._flat(batch), on_layer, before_layer)
        made: list[torch.Tensor] = []
        sending: list[Callable[[], None]] = []
        parts = micro_batches(batch, self.shard.pp)
        for index, part in enumerate(parts):
            self.io.finish()  # attention is planned in memory that the part before may still be read from
            flat = self._flat(part)
            before = None if self.shard.is_first else self._received(len(flat.token_ids))
            x = self.model.forward(
                flat, on_layer if index == len(parts) - 1 else None, before_layer if index == 0 else None, before
            )
            if self.shard.is_last:
                made.append(x)
            else:
                sending.append(self._others.send(x, self.shard.rank + self.shard.tp))
        for finish in sending:
            finish()
        return torch.cat(made) if made else None

    def _flat(self, batch: Sequence[SequenceSlice]) -> FlatBatch:
        return build_batch(batch, self.cache.layout, self._frequencies, put=self.io.put)

    def _received(self, num_tokens: int) -> torch.Tensor:
        x = torch.empty(num_tokens, self.shard.spec.hidden_size, dtype=self._dtype, device=self.cache.slab.device)
        self._others.receive(x, self.shard.rank - self.shard.tp)
        return x

    def _logits(self, hidden: torch.Tensor | None, rows: range | list[int]) -> torch.Tensor:
        if not rows:
            return torch.empty(0, self.shard.spec.vocab_size, device=self.io.device)
        own = None
        if hidden is not None:
            picked = self._rows(hidden, rows)
            own = self.model.logits(picked)
        if self.shard.tp * self.shard.pp == 1:
            assert own is not None
            return own
        return self._gathered(own, len(rows))

    def _rows(self, hidden: torch.Tensor, rows: range | list[int]) -> torch.Tensor:
        if isinstance(rows, range):
            return hidden[rows.start : rows.stop]
        return hidden.index_select(0, self.io.put(torch.tensor(rows)))

    def _gathered(self, own: torch.Tensor | None, num_rows: int) -> torch.Tensor:
        """Every rank of the last stage has a part of the vocabulary; rank 0 gets them all."""
        shard = self.shard
        if shard.rank != 0:
            if own is not None:
                self._others.send(own, 0)()
            return torch.empty(0, shard.spec.vocab_size)
        parts = []
        for rank in range((shard.pp - 1) * shard.tp, shard.pp * shard.tp):
            if rank == 0:
                assert own is not None
                parts.append(own)
                continue
            of_rank = ModelShard(spec=shard.spec, tp=shard.tp, pp=shard.pp, rank=rank)
            part = torch.empty(num_rows, len(of_rank.vocabulary), device=self.cache.slab.device)
            self._others.receive(part, rank)
            parts.append(part)
        return torch.cat(parts, dim=1)
