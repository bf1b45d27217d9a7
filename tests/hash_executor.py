"""A model for tests of transfer: its next token is a checksum of the KV in the cache, so a wrong byte shows.

KV of a token says which token, position and layer it is; nothing is learned, so thousands of requests run in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from tandem.kv.cache import KvCache
from tandem.kv.swap_memory import SwapMemory
from tandem.model.executor import LayerHook, SequenceSlice, SliceOutput
from tandem.model.grammar import GrammarCompiler
from tandem.model.spec import LayerSpec, ModelSpec
from tandem.types import BlockId, SampledToken

VOCAB_SIZE = 257
BLOCK_SIZE = 8
_LANES = 8
_PRIME = 65_521

SPEC = ModelSpec(
    name="hash",
    family="hash",
    num_layers=3,
    hidden_size=4,
    intermediate_size=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=VOCAB_SIZE,
    max_context_tokens=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    eos_token_ids=(),
    weights_digest="hash",
    ropes=(),
    layers=(LayerSpec(rope=None),) * 3,
    attention_scale=0.5,
)


def kv_of(token_ids: Sequence[int], first_position: int, layer: int) -> np.ndarray:
    """[tokens, lanes] float64 with whole numbers below 2**16."""
    tokens = np.asarray(token_ids, dtype=np.int64)[:, None]
    positions = np.arange(first_position, first_position + len(token_ids), dtype=np.int64)[:, None]
    lanes = np.arange(_LANES, dtype=np.int64)[None, :]
    return ((tokens * 7919 + positions * 104_729 + layer * 1299 + lanes * 31) % _PRIME).astype(np.float64)


def next_token(kv: np.ndarray) -> int:
    """Of [layers, tokens, lanes]; any other value in it almost surely gives another token."""
    if not np.isfinite(kv).all():
        return VOCAB_SIZE  # was never written: a token that no request can have
    weights = (np.arange(kv.size, dtype=np.float64).reshape(kv.shape) % 127) + 1
    return int((kv * weights).sum()) % VOCAB_SIZE


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request must get."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(np.stack([kv_of(tokens, 0, layer) for layer in range(SPEC.num_layers)])))
    return tokens[len(prompt) :]


class HashExecutor:
    """An `Executor`."""

    spec = SPEC

    def __init__(self, *, num_blocks: int, allocate: Callable[[int], torch.Tensor]) -> None:
        layout = SPEC.kv_layout(block_size=BLOCK_SIZE, dtype="float32")
        slab = allocate(layout.slab_bytes(num_blocks)).fill_(0xFF)
        self.cache = KvCache(layout, num_blocks, slab)
        self.grammars = GrammarCompiler(Path("no tokenizer"), vocab_size=VOCAB_SIZE, eos_token_ids=())
        self._layers = [layer.numpy() for layer in self.cache.layers]

    def execute(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> list[SliceOutput]:
        for layer in range(SPEC.num_layers):
            if before_layer is not None:
                before_layer(layer)
            for piece in batch:
                self._write(layer, piece)
            if on_layer is not None:
                on_layer(layer)
        return [SliceOutput(tokens=self._tokens(piece)) for piece in batch]

    def _tokens(self, piece: SequenceSlice) -> tuple[SampledToken, ...]:
        return tuple(SampledToken(token_id=next_token(self._read(piece))) for _ in piece.choices)

    def copy_blocks(self, sources: Sequence[BlockId], destinations: Sequence[BlockId]) -> None:
        self.cache.copy_blocks(sources, destinations)

    def open_swap(self, num_slots: int) -> None:
        self._swap = SwapMemory(self.cache, num_slots)

    def swap_out(self, blocks: Sequence[BlockId], slots: Sequence[BlockId]) -> None:
        self._swap.copy_out(blocks, slots)

    def swap_in(self, slots: Sequence[BlockId], blocks: Sequence[BlockId]) -> None:
        self._swap.copy_in(slots, blocks)

    def write_prompt(self, token_ids: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """The KV of the first tokens of a prompt, in all layers."""
        piece = SequenceSlice(token_ids=token_ids, num_computed=0, block_ids=block_ids)
        for layer in range(SPEC.num_layers):
            self._write(layer, piece)

    def _write(self, layer: int, piece: SequenceSlice) -> None:
        values = kv_of(piece.token_ids, piece.num_computed, layer)
        positions = np.arange(piece.num_computed, piece.num_computed + len(piece.token_ids))
        blocks = np.asarray(piece.block_ids)[positions // BLOCK_SIZE]
        halves = values.reshape(-1, 2, 1, SPEC.head_dim)
        self._layers[layer][blocks, :, :, positions % BLOCK_SIZE, :] = halves

    def _read(self, piece: SequenceSlice) -> np.ndarray:
        count = piece.num_computed + len(piece.token_ids)
        positions = np.arange(count)
        blocks = np.asarray(piece.block_ids)[positions // BLOCK_SIZE]
        read = [layer[blocks, :, :, positions % BLOCK_SIZE, :].reshape(count, _LANES) for layer in self._layers]
        return np.stack(read).astype(np.float64)
