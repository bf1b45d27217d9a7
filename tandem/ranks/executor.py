"""The Executor of a worker of several ranks, on rank 0: tells the others what to run, runs its share, samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.kv.cache import KvCache
from tandem.kv.swap_memory import SwapMemory
from tandem.model.executor import LayerHook, SequenceSlice, SliceOutput
from tandem.model.grammar import GrammarCompiler
from tandem.model.outputs import outputs_of, warm_up
from tandem.model.spec import ModelSpec
from tandem.ranks.batch_wire import pack_batch, pack_copies, pack_count
from tandem.ranks.channel import Kind
from tandem.ranks.hub import RankHub
from tandem.ranks.loading import LoadedRank
from tandem.types import BlockId


class ParallelExecutor:
    """Implements `Executor`. `cache` is rank 0's part; blocks have the same numbers on every rank."""

    def __init__(self, own: LoadedRank, hub: RankHub) -> None:
        """All ranks are ready."""
        self.hub = hub
        self._stage = own.stage
        self._swap = SwapMemory(own.stage.cache, 0)
        self._grammars = GrammarCompiler(
            own.tokenizer_file, vocab_size=self.spec.vocab_size, eos_token_ids=self.spec.eos_token_ids
        )

    @property
    def spec(self) -> ModelSpec:
        """The whole model's shape."""
        return self._stage.shard.spec

    @property
    def cache(self) -> KvCache:
        """Rank 0's part of the cache."""
        return self._stage.cache

    @property
    def compute(self) -> str:
        """Rank 0's device, precision and kernels, for people."""
        return self._stage.compute

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the model's vocabulary."""
        return self._grammars

    @torch.inference_mode()
    def execute(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> list[SliceOutput]:
        """See `Executor.execute`; the hooks hear of the layers of this rank. Raises TransportError without a rank."""
        self.hub.broadcast(Kind.BATCH, pack_batch(batch, self.cache.layout.block_size))
        return outputs_of(batch, self._stage.run(batch, on_layer, before_layer), self._stage.io.get)

    def copy_blocks(self, sources: Sequence[BlockId], destinations: Sequence[BlockId]) -> None:
        """See `Executor.copy_blocks`."""
        self.hub.broadcast(Kind.COPY, pack_copies(sources, destinations))
        self.cache.copy_blocks(sources, destinations)

    def open_swap(self, num_slots: int) -> None:
        """See `Executor.open_swap`: every rank has memory for its own part of a block."""
        self.hub.broadcast(Kind.SWAP_ROOM, pack_count(num_slots))
        self._swap = SwapMemory(self.cache, num_slots)

    def swap_out(self, blocks: Sequence[BlockId], slots: Sequence[BlockId]) -> None:
        """See `Executor.swap_out`. Waits for all ranks: a peer may write into any of them next."""
        self.hub.broadcast(Kind.SWAP_OUT, pack_copies(blocks, slots))
        self._swap.copy_out(blocks, slots)
        self.hub.wait_done()

    def swap_in(self, slots: Sequence[BlockId], blocks: Sequence[BlockId]) -> None:
        """See `Executor.swap_in`."""
        self.hub.broadcast(Kind.SWAP_IN, pack_copies(slots, blocks))
        self._swap.copy_in(slots, blocks)

    def warm_up(self) -> None:
        """See `outputs.warm_up`."""
        warm_up(self)
