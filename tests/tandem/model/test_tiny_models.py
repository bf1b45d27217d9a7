"""Hugging Face directories with grouped and with plain heads, tied and untied, whole and in shards."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.model.executor import SequenceSlice, SliceOutput
from tandem.model.files import resolve_model
from tandem.model.torch_executor import TorchExecutor
from tandem.types import BlockId, SamplingParams
from tests.engine_driver import EngineDriver
from tests.oracle import Oracle
from tests.tandem.model.conftest import make_executor
from tests.tiny_model import VOCAB_SIZE, save_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_kv_heads": 2},
    "one KV head, tied": {"num_kv_heads": 1, "tied": True},
    "plain heads, in shards": {"num_kv_heads": 4, "max_shard_size": "60KB"},
    "wide heads": {"num_kv_heads": 2, "head_dim": 32},
    "llama 3 rope": {"num_kv_heads": 2, "rope_parameters": LLAMA3},
}
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def make_prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_model_gives_the_tokens_of_transformers_alone_and_eight_at_a_time(kind: str, tmp_path: Path) -> None:
    directory = save_tiny_llama(tmp_path / "model", **KINDS[kind])
    oracle, prompts = Oracle(resolve_model(str(directory))), make_prompts()
    expected = [list(oracle.tokens(prompt, GREEDY.max_tokens)) for prompt in prompts]
    executor = make_executor(directory, num_blocks=80)
    assert EngineDriver(executor, max_sequences=1, chunk_tokens=512).run(prompts, GREEDY) == expected
    assert EngineDriver(executor, max_sequences=8, chunk_tokens=20).run(prompts, GREEDY) == expected


def test_the_sharded_model_really_is_in_shards(tmp_path: Path) -> None:
    directory = save_tiny_llama(tmp_path, **KINDS["plain heads, in shards"])
    assert len(resolve_model(str(directory)).weights) > 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TorchExecutor:
    return make_executor(save_tiny_llama(tmp_path_factory.mktemp("tiny"), num_kv_heads=2), num_blocks=80)


def test_seeded_sampling_does_not_depend_on_batch_or_chunks(tiny: TorchExecutor) -> None:
    base = SamplingParams(max_tokens=24, temperature=1.5)
    kinds = [base, replace(base, top_k=20), replace(base, top_p=0.8), replace(base, top_k=50, top_p=0.9)]
    requests = [(p, replace(kinds[i % 4], seed=100 + i)) for i, p in enumerate(make_prompts())]
    alone = EngineDriver(tiny, max_sequences=1, chunk_tokens=512).run_each(requests)
    together = EngineDriver(tiny, max_sequences=8, chunk_tokens=512, seed=3).run_each(requests)
    in_chunks = EngineDriver(tiny, max_sequences=3, chunk_tokens=7, seed=4).run_each(requests)
    assert alone == together == in_chunks


def test_another_seed_gives_other_tokens(tiny: TorchExecutor) -> None:
    driver = EngineDriver(tiny, max_sequences=2, chunk_tokens=512)
    prompt = make_prompts()[5]
    one, other = driver.run_each([(prompt, SamplingParams(max_tokens=24, seed=s)) for s in (1, 2)])
    assert one != other


def test_a_layer_is_announced_once_its_keys_and_values_are_in_the_cache_and_in_order(tiny: TorchExecutor) -> None:
    cache = tiny.cache
    announced: list[tuple[int, list[bool]]] = []
    cache.slab.fill_(0xFF)

    def on_layer(layer: int) -> None:
        written = [bool(cache.layers[i][5, :, :, :10].isfinite().all()) for i in range(cache.layout.num_layers)]
        announced.append((layer, written))

    piece = SequenceSlice(token_ids=list(range(10)), num_computed=0, block_ids=[BlockId(5)])
    assert tiny.execute([piece], on_layer) == [SliceOutput()]
    assert announced == [(0, [True, False, False]), (1, [True, True, False]), (2, [True, True, True])]
    assert not cache.layers[0][5, :, :, 10:].isfinite().any()


def test_warm_up_runs_on_the_smallest_cache(tmp_path: Path) -> None:
    make_executor(save_tiny_llama(tmp_path, num_kv_heads=2), num_blocks=1).warm_up()
