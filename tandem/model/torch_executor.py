"""The Executor in torch on one device: batches in, sampled tokens out; and `load_executor`, from a name to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem.kv.cache import TORCH_DTYPE, KvCache
from tandem.kv.layout import Dtype
from tandem.model.attention.torch_cpu import TorchAttention
from tandem.model.batch import build_batch
from tandem.model.executor import LayerHook, SequenceSlice
from tandem.model.files import resolve_model
from tandem.model.llama import LlamaModel
from tandem.model.loader import load_spec, load_weights
from tandem.model.sampler import sample_rows
from tandem.model.spec import ModelSpec
from tandem.model.weights import Weights
from tandem.types import BlockId, SamplingParams

_WARM_UP_TOKENS = 32


class TorchExecutor:
    """Implements `Executor`. `num_threads` sets torch's compute threads, process-wide; 0 leaves them."""

    def __init__(self, spec: ModelSpec, weights: Weights, cache: KvCache, *, num_threads: int = 0) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)
        self._spec = spec
        self._cache = cache
        self._frequencies = weights.inverse_frequencies
        attention = TorchAttention(cache.layout, TORCH_DTYPE[cache.layout.dtype])
        self._model = LlamaModel(spec, weights, cache, attention)

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self._spec

    @property
    def cache(self) -> KvCache:
        """The paged KV cache that slices point into."""
        return self._cache

    @torch.inference_mode()
    def logits(self, batch: Sequence[SequenceSlice], on_layer: LayerHook | None = None) -> torch.Tensor:
        """Runs one iteration; for each slice with sampling, in order, its last row: `[num_sampled, vocab]` fp32."""
        return self._model.forward(build_batch(batch, self._cache.layout, self._frequencies), on_layer)

    @torch.inference_mode()
    def execute(self, batch: Sequence[SequenceSlice], on_layer: LayerHook | None = None) -> list[int | None]:
        """See `Executor.execute`."""
        logits = self.logits(batch, on_layer)
        rows = [(piece.sampling, piece.output_position) for piece in batch if piece.sampling is not None]
        tokens = iter(sample_rows(logits, rows) if rows else ())
        return [None if piece.sampling is None else next(tokens) for piece in batch]

    def warm_up(self) -> None:
        """Runs a small prefill and a decode, so that the first request does not pay for it.

        Call before any block is in use: it writes to the first blocks of the cache.
        """
        layout = self._cache.layout
        capacity = min(self._cache.num_blocks * layout.block_size, self._spec.max_context_tokens)
        num_tokens = min(_WARM_UP_TOKENS, capacity - 1)
        blocks = [BlockId(i) for i in range(layout.num_blocks_for(num_tokens + 1))]
        sampling = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9)
        prompt = SequenceSlice(token_ids=[0] * num_tokens, num_computed=0, block_ids=blocks, sampling=sampling)
        token = SequenceSlice(token_ids=[0], num_computed=num_tokens, block_ids=blocks, sampling=sampling)
        self.execute([prompt])
        self.execute([token])


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
    return TorchExecutor(spec, load_weights(files, spec, dtype), cache, num_threads=num_threads)
