"""Where every tensor of an iteration lies, which a GPU that computes nothing can show; and what a real one computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kv.cache import KvCache
from tandem.kv.layout import Dtype
from tandem.model.attention.choose import ChosenAttention
from tandem.model.attention.flashinfer import FlashInferAttention
from tandem.model.choice import Choice
from tandem.model.cuda_graphs import CudaCapturer
from tandem.model.executor import Scoring, SequenceSlice
from tandem.model.files import resolve_model
from tandem.model.loader import load_spec, load_weights
from tandem.model.outputs import outputs_of
from tandem.model.parallel import ModelShard
from tandem.model.stage import Stage
from tandem.model.torch_executor import TorchExecutor, load_executor
from tandem.types import BlockId, SamplingParams
from tests.engine_driver import EngineDriver
from tests.fake_gpu import DEVICE, FakeGpu, moved
from tests.flashinfer_reference import ReferenceFlashInfer
from tests.gpus import need_gpus
from tests.tandem.model.conftest import make_executor
from tests.tandem.model.test_graphed_decode import RerunCapturer
from tests.tiny_families import save_tiny
from tests.tiny_model import VOCAB_SIZE, save_tiny_llama

NUM_BLOCKS, BLOCK_SIZE = 12, 16
SCORED = Scoring(targets=[1] * 8, num_top=2)


class Copying:
    """In place of kernels: the query is the output."""

    def plan(self, *_: object, **__: object) -> None:
        pass

    def run(self, query: torch.Tensor, cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        assert query.device == cache.device == out.device == DEVICE
        return out.copy_(query)


class CopyingWrappers(ReferenceFlashInfer):
    """FlashInfer without its kernels."""

    def BatchPrefillWithPagedKVCacheWrapper(self, *_: Any) -> Any:
        return Copying()

    def BatchDecodeWithPagedKVCacheWrapper(self, *_: Any, **__: Any) -> Any:
        return Copying()


def stage_on(
    gpu: FakeGpu, directory: Path, patch: pytest.MonkeyPatch, *, attention: Callable[[KvCache], Any] | None = None
) -> Stage:
    """A whole model on the fake GPU."""
    patch.setattr("tandem.model.linear.kernels", lambda: None)
    patch.setattr("tandem.model.stage.io_for", lambda device: gpu)
    files = resolve_model(str(directory))
    spec = load_spec(files)
    layout = spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32")
    slab = gpu.empty(torch.zeros(layout.slab_bytes(NUM_BLOCKS), dtype=torch.uint8))
    cache = KvCache(layout, NUM_BLOCKS, slab)
    weights = moved(load_weights(files, spec, "float32"), gpu.empty)
    chosen = None if attention is None else ChosenAttention(backend=attention(cache), name="flashinfer")
    return Stage(ModelShard(spec=spec), weights, cache, attention=chosen)


def pieces() -> list[SequenceSlice]:
    """A chunk after another, a prompt that is scored, and single tokens: some sampled, one not."""
    drawn = Choice(SamplingParams(max_tokens=2, temperature=1.0, top_k=3))
    blocks = [BlockId(b) for b in range(8)]
    return [
        SequenceSlice(token_ids=[1] * 20, num_computed=16, block_ids=blocks[:3], choices=[drawn]),
        SequenceSlice(token_ids=[2] * 9, num_computed=0, block_ids=blocks[3:4], scoring=SCORED),
        SequenceSlice(token_ids=[3], num_computed=40, block_ids=blocks[4:7], choices=[drawn, drawn]),
        SequenceSlice(token_ids=[3], num_computed=7, block_ids=blocks[7:]),
    ]


@pytest.mark.parametrize("name", ["llama 3", "gemma 2", "gemma 3", "qwen 2"])
def test_nothing_of_an_iteration_lies_on_the_host_that_a_gpu_computes_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    stage = stage_on(gpu, save_tiny(tmp_path, name), monkeypatch)
    assert stage.kernels == "torch"
    layers: list[int] = []
    outputs = outputs_of(pieces(), stage.run(pieces(), layers.append), gpu.get)
    assert [len(output.tokens) for output in outputs] == [1, 0, 2, 0]
    assert len(outputs[1].scores) == 8
    assert layers == list(range(stage.cache.layout.num_layers))
    assert gpu.num_finished == 1


def test_a_captured_iteration_asks_nothing_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()

    def attention(cache: KvCache) -> FlashInferAttention:
        return FlashInferAttention(cache.layout, 4, device=DEVICE, wrappers=CopyingWrappers())

    stage = stage_on(gpu, save_tiny(tmp_path, "llama 3"), monkeypatch, attention=attention)
    with gpu.mode:  # whatever is made anew is fake too, and has a device
        assert stage.use_graphs(4, RerunCapturer())
        assert stage.graphs is not None
        before = gpu.num_put
        stage.graphs._run(4)
    assert gpu.num_put == before


@pytest.fixture
def real_gpu() -> torch.device:
    return need_gpus()[0]


def executor_on(device: torch.device, directory: Path, dtype: Dtype) -> TorchExecutor:
    return load_executor(
        str(directory),
        dtype=dtype,
        block_size=BLOCK_SIZE,
        num_blocks=80,
        allocate=lambda num_bytes: torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device),
        num_threads=1,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama 3", "gemma 2", "gemma 3", "mixtral"])
def test_a_gpu_gives_the_tokens_of_the_cpu_in_fp32(real_gpu: torch.device, tmp_path: Path, name: str) -> None:
    directory, greedy = save_tiny(tmp_path, name), SamplingParams(max_tokens=24, temperature=0.0)
    prompts = [[(7 * i) % 250 for i in range(length)] for length in (1, 15, 16, 17, 63, 200)]
    found = EngineDriver(executor_on(real_gpu, directory, "float32"), max_sequences=6, chunk_tokens=50)
    expected = EngineDriver(make_executor(directory, num_blocks=80), max_sequences=6, chunk_tokens=50)
    assert found.run(prompts, greedy) == expected.run(prompts, greedy)


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [0, 8])
def test_flashinfer_and_graphs_give_logits_near_the_cpus_in_bf16(
    real_gpu: torch.device, tmp_path: Path, largest: int
) -> None:
    pytest.importorskip("flashinfer")
    directory = save_tiny_llama(tmp_path, num_kv_heads=2, head_dim=64)
    gpu, cpu = executor_on(real_gpu, directory, "bfloat16"), executor_on(torch.device("cpu"), directory, "bfloat16")
    assert gpu.stage.kernels == "flashinfer"
    assert not largest or gpu.stage.use_graphs(largest, CudaCapturer())
    choice = [Choice(SamplingParams(max_tokens=2, temperature=0.0))]
    blocks = [[BlockId(4 * row + b) for b in range(4)] for row in range(5)]
    prompts = [
        SequenceSlice(
            token_ids=[(row + 3 * i) % VOCAB_SIZE for i in range(20 + row)],
            num_computed=0,
            block_ids=table,
            choices=choice,
        )
        for row, table in enumerate(blocks)
    ]
    singles = [
        SequenceSlice(token_ids=[9], num_computed=len(prompt.token_ids), block_ids=prompt.block_ids, choices=choice)
        for prompt in prompts
    ]
    for batch in (prompts, singles):
        found, expected = gpu.logits(batch).cpu(), cpu.logits(batch)
        assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.995
