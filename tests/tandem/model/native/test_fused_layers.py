"""All layers in one call of the kernels: the numbers, the cache and the hooks of layers called part by part."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tandem.kv.cache import KvCache
from tandem.model import decoder as decoder_module
from tandem.model.attention.native import NativeAttention
from tandem.model.batch import FlatBatch, build_batch
from tandem.model.decoder import Decoder
from tandem.model.executor import SequenceSlice
from tandem.model.files import resolve_model
from tandem.model.fused_layers import can_fuse
from tandem.model.loader import load_spec, load_weights
from tandem.model.native import kernels
from tandem.types import BlockId
from tests.tiny_families import KINDS, save_tiny

NOT_FUSED = ("gemma", "moe", "mixtral")
FUSED = [kind for kind in KINDS if not any(name in kind for name in NOT_FUSED)]
BLOCK_SIZE, NUM_BLOCKS = 16, 24
SHAPES = [(0, 37), (70, 1), (33, 5), (128, 1), (15, 1)]
"""(computed, tokens): chunks and single tokens, across blocks and windows."""


class Loaded:
    """A model's weights, and decoders of them with a cache of numbers each."""

    def __init__(self, directory: str) -> None:
        files = resolve_model(directory)
        self.spec = load_spec(files)
        self.weights = load_weights(files, self.spec, "float32")
        self.layout = self.spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32")

    def new_cache(self) -> KvCache:
        numbers = torch.randn(self.layout.slab_bytes(NUM_BLOCKS) // 4, generator=torch.Generator().manual_seed(3))
        return KvCache(self.layout, NUM_BLOCKS, numbers.view(torch.uint8))

    def decoder(self, cached: KvCache) -> Decoder:
        own = kernels()
        assert own is not None
        return Decoder(self.spec, self.weights, cached, NativeAttention(own, self.layout))

    def batch(self) -> FlatBatch:
        free = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4)).tolist())
        pieces = [
            SequenceSlice(
                token_ids=[(7 * i + computed) % self.spec.vocab_size for i in range(tokens)],
                num_computed=computed,
                block_ids=[BlockId(next(free)) for _ in range(self.layout.num_blocks_for(computed + tokens))],
                choices=(),
            )
            for computed, tokens in SHAPES
        ]
        return build_batch(pieces, self.layout, self.weights.frequencies)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    return cache(lambda kind: Loaded(str(save_tiny(tmp_path_factory.mktemp("model"), kind))))


@pytest.mark.parametrize("kind", FUSED)
def test_they_give_the_numbers_of_the_parts_and_leave_the_same_cache(
    loaded: Callable[[str], Loaded], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(kind)
    together, apart = model.new_cache(), model.new_cache()
    assert can_fuse(model.weights, together)
    found = model.decoder(together).forward(model.batch())
    monkeypatch.setattr(decoder_module, "can_fuse", lambda *_: False)
    expected = model.decoder(apart).forward(model.batch())
    assert torch.equal(found, expected)
    assert torch.equal(together.slab, apart.slab)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FUSED])
def test_layers_of_other_kinds_are_left_to_their_parts(loaded: Callable[[str], Loaded], kind: str) -> None:
    assert not can_fuse(loaded(kind).weights, loaded(kind).new_cache())


def test_hooks_come_before_each_layer_and_when_its_keys_are_written(loaded: Callable[[str], Loaded]) -> None:
    model = loaded("llama 2")
    cached, alone = model.new_cache(), model.new_cache()
    before = alone.slab.clone()
    expected = model.decoder(alone).forward(model.batch())
    events: list[tuple[str, int, bool]] = []

    def note(what: str) -> Callable[[int], None]:
        def hook(layer: int) -> None:
            untouched = before.view(len(cached.layers), -1)[layer]
            written = not torch.equal(cached.slab.view(len(cached.layers), -1)[layer], untouched)
            events.append((what, layer, written))

        return hook

    found = model.decoder(cached).forward(model.batch(), note("written"), note("before"))
    layers = range(model.spec.num_layers)
    assert events == [event for i in layers for event in (("before", i, False), ("written", i, True))]
    assert torch.equal(found, expected)
    assert torch.equal(cached.slab, alone.slab)


def test_room_is_taken_again_and_grows(loaded: Callable[[str], Loaded]) -> None:
    model = loaded("llama 2")
    subject = model.decoder(model.new_cache())
    few = subject.logits(torch.ones(2, model.spec.hidden_size))
    kept = few.clone()
    many = subject.logits(torch.ones(5, model.spec.hidden_size))
    again = subject.logits(torch.ones(3, model.spec.hidden_size))
    assert again.data_ptr() == many.data_ptr()
    assert torch.equal(again[:2], kept)
