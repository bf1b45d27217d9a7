"""Each of a family's options matters to the small models that are compared, so that a forgotten one would be seen.

And what does not depend on the option: shards, precision.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kv.cache import KvCache
from tandem.kv.layout import Dtype
from tandem.model.choice import Choice
from tandem.model.executor import SequenceSlice
from tandem.model.files import resolve_model
from tandem.model.loader import load_spec, load_weights
from tandem.model.rope import rotary_frequencies
from tandem.model.spec import ModelSpec
from tandem.model.torch_executor import TorchExecutor
from tandem.model.weights import Weights
from tandem.types import BlockId, SamplingParams
from tests.tandem.model.conftest import make_executor
from tests.tiny_families import KINDS, save_tiny

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
BLOCK_SIZE, NUM_BLOCKS = 16, 6
CLEARLY = 0.05
"""Fifty times what may differ from transformers."""


def draw_prompt() -> list[int]:
    draw = random.Random(2)
    return [draw.randrange(256) for _ in range(BLOCK_SIZE * NUM_BLOCKS - 6)]


def last_logits(executor: TorchExecutor) -> torch.Tensor:
    blocks = [BlockId(i) for i in range(NUM_BLOCKS)]
    piece = SequenceSlice(token_ids=draw_prompt(), num_computed=0, block_ids=blocks, choices=[Choice(GREEDY)])
    return executor.logits([piece])[0]


class Small:
    """A model whose spec may be changed after its weights are loaded."""

    def __init__(self, directory: Path) -> None:
        files = resolve_model(str(directory))
        self.spec = load_spec(files)
        self.weights = load_weights(files, self.spec, "float32")
        self._tokenizer_file = files.tokenizer_dir / "tokenizer.json"

    def logits(self, spec: ModelSpec, weights: Weights) -> torch.Tensor:
        layout = spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32")
        slab = torch.zeros(layout.slab_bytes(NUM_BLOCKS), dtype=torch.uint8)
        cached = KvCache(layout, NUM_BLOCKS, slab)
        return last_logits(TorchExecutor(spec, weights, cached, tokenizer_file=self._tokenizer_file))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Small]:
    return cache(lambda kind: Small(save_tiny(tmp_path_factory.mktemp("model"), kind)))


def wider(spec: ModelSpec) -> ModelSpec:
    """Every window one token wider."""
    layers = (replace(layer, window=layer.window and layer.window + 1) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def same_positions(spec: ModelSpec) -> ModelSpec:
    """The first kind of positions in every layer."""
    return replace(spec, layers=tuple(replace(layer, rope=0) for layer in spec.layers))


def with_experts(spec: ModelSpec, **changes: Any) -> ModelSpec:
    assert spec.experts is not None
    return replace(spec, experts=replace(spec.experts, **changes))


SPEC_CHANGES: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "mistral's window": ("mistral", wider),
    "qwen 2's window": ("qwen 2, window and yarn", wider),
    "gemma 2's window": ("gemma 2", wider),
    "gemma 3's window": ("gemma 3", wider),
    "smollm 3's window": ("smollm 3, window", wider),
    "smollm 3's layers without positions": ("smollm 3", same_positions),
    "gemma 3's two kinds of positions": ("gemma 3", same_positions),
    "gemma 2's scale of scores": ("gemma 2", lambda spec: replace(spec, attention_scale=spec.head_dim**-0.5)),
    "gemma 2's capped scores": ("gemma 2", lambda spec: replace(spec, attention_softcap=None)),
    "gemma 2's capped logits": ("gemma 2", lambda spec: replace(spec, logit_softcap=None)),
    "gemma 2's activation": ("gemma 2", lambda spec: replace(spec, activation="silu")),
    "mixtral's number of experts": ("mixtral", lambda spec: with_experts(spec, num_chosen=3)),
    "qwen 3's shares": ("qwen 3 moe", lambda spec: with_experts(spec, normalised=False)),
}


@pytest.mark.parametrize("option", SPEC_CHANGES)
def test_an_option_of_the_spec_matters(small: Callable[[str], Small], option: str) -> None:
    kind, change = SPEC_CHANGES[option]
    model = small(kind)
    true, changed = (model.logits(spec, model.weights) for spec in (model.spec, change(model.spec)))
    assert (true - changed).abs().max() > CLEARLY


def unscaled(spec: ModelSpec, weights: Weights) -> Weights:
    plain = (rotary_frequencies(replace(rope, scaling=None), spec.head_dim) for rope in spec.ropes)
    return replace(weights, frequencies=tuple(plain))


def without(part: str) -> Callable[[ModelSpec, Weights], Weights]:
    """No such tensor in any layer's attention."""

    def change(spec: ModelSpec, weights: Weights) -> Weights:
        assert getattr(weights.layers[0].attention, part) is not None
        layers = (replace(layer, attention=replace(layer.attention, **{part: None})) for layer in weights.layers)
        return replace(weights, layers=tuple(layers))

    return change


def without_mlp_norms(spec: ModelSpec, weights: Weights) -> Weights:
    return replace(weights, layers=tuple(replace(layer, mlp_post_norm=None) for layer in weights.layers))


WEIGHT_CHANGES: dict[str, tuple[str, Callable[[ModelSpec, Weights], Weights]]] = {
    "llama 3's scaling": ("llama 3", unscaled),
    "linear scaling": ("llama, linear", unscaled),
    "yarn": ("qwen 2, window and yarn", unscaled),
    "gemma 3's scaling": ("gemma 3", unscaled),
    "qwen 2's biases": ("qwen 2", without("qkv_bias")),
    "qwen 3's norms of queries": ("qwen 3", without("q_norm")),
    "qwen 3's norms of keys": ("qwen 3 moe", without("k_norm")),
    "gemma 2's norms after attention": ("gemma 2", without("post_norm")),
    "gemma 2's norms after the MLP": ("gemma 2", without_mlp_norms),
}


@pytest.mark.parametrize("option", WEIGHT_CHANGES)
def test_an_option_of_the_weights_matters(small: Callable[[str], Small], option: str) -> None:
    kind, change = WEIGHT_CHANGES[option]
    model = small(kind)
    true, changed = (
        model.logits(model.spec, weights) for weights in (model.weights, change(model.spec, model.weights))
    )
    assert (true - changed).abs().max() > CLEARLY


@pytest.mark.parametrize("kind", ["gemma 3", "mixtral"])
def test_a_model_in_shards_gives_the_logits_of_the_whole_one(kind: str, tmp_path: Path) -> None:
    whole, shards = save_tiny(tmp_path / "whole", kind), save_tiny(tmp_path / "shards", kind, max_shard_size="150KB")
    assert len(resolve_model(str(shards)).weights) > 2
    one, other = (last_logits(make_executor(directory, num_blocks=NUM_BLOCKS)) for directory in (whole, shards))
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_the_logits_are_nearly_those_in_float32(kind: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, kind)
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    exact, rounded = (last_logits(make_executor(directory, num_blocks=NUM_BLOCKS, dtype=d)) for d in dtypes)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.97
