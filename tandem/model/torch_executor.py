"""The Executor in torch on one device: batches in, sampled tokens out; and `load_executor`, from a name to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tandem.kv.cache import KvCache
from tandem.kv.layout import Dtype
from tandem.kv.swap_memory import SwapMemory
from tandem.model.executor import LayerHook, SequenceSlice, SliceOutput
from tandem.model.files import resolve_model
from tandem.model.grammar import GrammarCompiler
from tandem.model.loader import load_spec, load_weights
from tandem.model.outputs import outputs_of, warm_up
from tandem.model.parallel import ModelShard
from tandem.model.spec import ModelSpec
from tandem.model.stage import Stage
from tandem.model.weights import Weights
from tandem.types import BlockId


class TorchExecutor:
    """Implements `Executor`. `num_threads` sets torch's compute threads, process-wide; 0 leaves them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        cache: KvCache,
        *,
        tokenizer_file: Path,
        num_threads: int = 0,
    ) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)
        self._spec = spec
        self._cache = cache
        self._swap = SwapMemory(cache, 0)
        self.stage = Stage(ModelShard(spec=spec), weights, cache)
        self._grammars = GrammarCompiler(
            tokenizer_file, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids
        )

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self._spec

    @property
    def cache(self) -> KvCache:
        """The paged KV cache that slices point into."""
        return self._cache

    @property
    def compute(self) -> str:
        """Device, precision and kernels, for people."""
        return self.stage.compute

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the model's vocabulary."""
        return self._grammars

    @torch.inference_mode()
    def logits(self, batch: Sequence[SequenceSlice], on_layer: LayerHook | None = None) -> torch.Tensor:
        """Runs one iteration; for each slice with choices, in order, its last row: `[num_sampled, vocab]` fp32."""
        return next(self.stage.run(batch, on_layer)).clone()

    @torch.inference_mode()
    def execute(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> list[SliceOutput]:
        """See `Executor.execute`."""
        return outputs_of(batch, self.stage.run(batch, on_layer, before_layer), self.stage.io.get)

    def copy_blocks(self, sources: Sequence[BlockId], destinations: Sequence[BlockId]) -> None:
        """See `Executor.copy_blocks`."""
        self._cache.copy_blocks(sources, destinations)

    def open_swap(self, num_slots: int) -> None:
        """See `Executor.open_swap`."""
        self._swap = SwapMemory(self._cache, num_slots)

    def swap_out(self, blocks: Sequence[BlockId], slots: Sequence[BlockId]) -> None:
        """See `Executor.swap_out`."""
        self._swap.copy_out(blocks, slots)

    def swap_in(self, slots: Sequence[BlockId], blocks: Sequence[BlockId]) -> None:
        """See `Executor.swap_in`."""
        self._swap.copy_in(slots, blocks)

    def warm_up(self) -> None:
        """See `outputs.warm_up`."""
        warm_up(self)


def load_executor(
    source: str,
    *,
    dtype: Dtype,
    block_size: int,
    num_blocks: int,
    allocate: Callable[[int], torch.Tensor],
    num_threads: int = 0,
) -> TorchExecutor:
    """Resolves and loads a model, and gives it a cache of `num_blocks` in memory from `allocate(num_bytes)`.

    Raises ModelLoadError; whatever `allocate` raises passes through.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    files = resolve_model(source)
    spec = load_spec(files)
    layout = spec.kv_layout(block_size=block_size, dtype=dtype)
    cache = KvCache(layout, num_blocks, allocate(layout.slab_bytes(num_blocks)))
    weights = load_weights(files, spec, dtype, device=cache.slab.device)
    tokenizer_file = files.tokenizer_dir / "tokenizer.json"
    return TorchExecutor(spec, weights, cache, tokenizer_file=tokenizer_file, num_threads=num_threads)
