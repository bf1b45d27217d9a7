"""The Executor in torch on one device: batches in, sampled tokens out; and `load_executor`, from a name to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tandem.kv.cache import TORCH_DTYPE, KvCache
from tandem.kv.layout import Dtype
from tandem.model.attention.torch_cpu import TorchAttention
from tandem.model.batch import build_batch
from tandem.model.choice import Choice
from tandem.model.executor import LayerHook, Scoring, SequenceSlice, SliceOutput
from tandem.model.files import resolve_model
from tandem.model.grammar import GrammarCompiler
from tandem.model.llama import LlamaModel
from tandem.model.loader import load_spec, load_weights
from tandem.model.logprobs import report
from tandem.model.sampling import choose
from tandem.model.spec import ModelSpec
from tandem.model.weights import Weights
from tandem.types import BlockId, SamplingParams, TokenLogprobs

_WARM_UP_TOKENS = 32
_SCORED_ROWS = 64
"""Prompt tokens whose logits are held at once."""


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
        self._frequencies = weights.inverse_frequencies
        attention = TorchAttention(cache.layout, TORCH_DTYPE[cache.layout.dtype])
        self._model = LlamaModel(spec, weights, cache, attention)
        self._grammars = GrammarCompiler(tokenizer_file, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self._spec

    @property
    def cache(self) -> KvCache:
        """The paged KV cache that slices point into."""
        return self._cache

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the model's vocabulary."""
        return self._grammars

    @torch.inference_mode()
    def logits(self, batch: Sequence[SequenceSlice], on_layer: LayerHook | None = None) -> torch.Tensor:
        """Runs one iteration; for each slice with choices, in order, its last row: `[num_sampled, vocab]` fp32."""
        flat = build_batch(batch, self._cache.layout, self._frequencies)
        return self._model.logits(self._model.forward(flat, on_layer).index_select(0, flat.sampled))

    @torch.inference_mode()
    def execute(self, batch: Sequence[SequenceSlice], on_layer: LayerHook | None = None) -> list[SliceOutput]:
        """See `Executor.execute`."""
        flat = build_batch(batch, self._cache.layout, self._frequencies)
        hidden = self._model.forward(flat, on_layer)
        logits = self._model.logits(hidden.index_select(0, flat.sampled))
        tokens = iter(choose(logits, [piece.choices for piece in batch if piece.choices]))
        return [
            SliceOutput(
                tokens=next(tokens) if piece.choices else (),
                scores=self._score(hidden[part.q_start : part.q_end], piece.scoring) if piece.scoring else (),
            )
            for piece, part in zip(batch, flat.slices, strict=True)
        ]

    def _score(self, hidden: torch.Tensor, scoring: Scoring) -> tuple[TokenLogprobs, ...]:
        """A few rows at a time: a row of logits is as wide as the vocabulary."""
        scores: list[TokenLogprobs] = []
        for start in range(0, len(scoring.targets), _SCORED_ROWS):
            targets = scoring.targets[start : start + _SCORED_ROWS]
            logits = self._model.logits(hidden[start : start + len(targets)])
            scores += report(logits.log_softmax(-1), targets, [scoring.num_top] * len(targets))
        return tuple(scores)

    def warm_up(self) -> None:
        """Runs a small prefill and a decode, so that the first request does not pay for it.

        Call before any block is in use: it writes to the first blocks of the cache.
        """
        layout = self._cache.layout
        capacity = min(self._cache.num_blocks * layout.block_size, self._spec.max_context_tokens)
        num_tokens = min(_WARM_UP_TOKENS, capacity - 1)
        blocks = [BlockId(i) for i in range(layout.num_blocks_for(num_tokens + 1))]
        choices = [Choice(SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9))]
        prompt = SequenceSlice(token_ids=[0] * num_tokens, num_computed=0, block_ids=blocks, choices=choices)
        token = SequenceSlice(token_ids=[0], num_computed=num_tokens, block_ids=blocks, choices=choices)
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
    weights = load_weights(files, spec, dtype)
    tokenizer_file = files.tokenizer_dir / "tokenizer.json"
    return TorchExecutor(spec, weights, cache, tokenizer_file=tokenizer_file, num_threads=num_threads)
