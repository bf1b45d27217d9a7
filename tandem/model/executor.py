"""The seam between schedulers and the model: a batch of sequence slices in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.kv.cache import KvCache
from tandem.model.choice import Choice
from tandem.model.grammar import GrammarCompiler
from tandem.model.spec import ModelSpec
from tandem.types import BlockId, SampledToken, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Log-probabilities wanted of given tokens: `targets[i]` comes after the slice's token `i` in the prompt."""

    targets: Sequence[int]
    num_top: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSlice:
    """The part of one sequence that an iteration computes: a prefill chunk, or the one newest token in decode.

    `token_ids` are at context positions `num_computed .. num_computed + len(token_ids)`; the KV of all earlier
    positions is in the cache. `block_ids` is the block table, long enough for all of them. For each of `choices` the
    token after the slice is sampled; reading them is all that the executor does with them.
    """

    token_ids: Sequence[int]
    num_computed: int
    block_ids: Sequence[BlockId]
    choices: Sequence[Choice] = ()
    scoring: Scoring | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceOutput:
    """What came of one slice: a token for each of its choices, an entry for each target of its scoring."""

    tokens: tuple[SampledToken, ...] = ()
    scores: tuple[TokenLogprobs, ...] = ()


LayerHook = Callable[[int], None]
"""Called with the layer index: `on_layer` as soon as that layer's K and V of the whole batch are in the cache."""


class Executor(Protocol):
    """One model replica with its KV cache. Not thread-safe: one engine thread drives it."""

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""

    @property
    def cache(self) -> KvCache:
        """The paged KV cache that slices point into."""

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the model's vocabulary. Its owner closes it."""

    def execute(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> list[SliceOutput]:
        """Runs one iteration over the flat batch. One entry per slice.

        `before_layer` may wait until the KV that slices have before them is in the cache, in that layer.
        """

    def copy_blocks(self, sources: Sequence[BlockId], destinations: Sequence[BlockId]) -> None:
        """Copies whole blocks in all layers, before the next iteration; no block is on both sides."""

    def open_swap(self, num_slots: int) -> None:
        """Makes host memory for `num_slots` blocks. Once, before the first swap."""

    def swap_out(self, blocks: Sequence[BlockId], slots: Sequence[BlockId]) -> None:
        """Copies blocks, all layers, into slots of that memory. On return nobody reads the blocks any more."""

    def swap_in(self, slots: Sequence[BlockId], blocks: Sequence[BlockId]) -> None:
        """Copies slots back into blocks, before the next iteration."""
