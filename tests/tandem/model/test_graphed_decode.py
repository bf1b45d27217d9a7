"""Whole generations through FlashInfer's calls and through replayed graphs, against the CPU's own kernels.

A reference computes what FlashInfer would; a graph is the captured work done again, with whatever lies in its buffers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.model.attention.choose import ChosenAttention
from tandem.model.attention.flashinfer import FlashInferAttention
from tandem.model.cuda_graphs import Graph
from tandem.model.decode_inputs import ladder
from tandem.model.device_io import HOST
from tandem.model.executor import SequenceSlice
from tandem.model.files import resolve_model
from tandem.model.loader import load_weights
from tandem.model.parallel import ModelShard
from tandem.model.stage import Stage
from tandem.model.torch_executor import TorchExecutor
from tandem.types import BlockId, Grammar, GrammarKind, Request, RequestId, SamplingParams
from tests.engine_driver import Answer, EngineDriver
from tests.flashinfer_reference import ReferenceFlashInfer
from tests.tandem.model.conftest import make_executor
from tests.tiny_families import save_tiny

NUM_BLOCKS = 40
VOCABULARY = 256


class RerunGraph:
    """Does the work again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._run()


class RerunCapturer:
    """Captures without doing anything, as CUDA does."""

    def __init__(self) -> None:
        self.graphs: list[RerunGraph] = []

    def capture(self, run: Callable[[], None]) -> Graph:
        self.graphs.append(RerunGraph(run))
        return self.graphs[-1]

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


def on_flashinfer(directory: Path) -> tuple[TorchExecutor, ReferenceFlashInfer]:
    """An executor whose attention makes FlashInfer's calls."""
    executor, reference = make_executor(directory, num_blocks=NUM_BLOCKS), ReferenceFlashInfer()
    spec, cache = executor.spec, executor.cache
    attention = FlashInferAttention(cache.layout, spec.num_heads, device=HOST, wrappers=reference)
    executor.stage = Stage(
        ModelShard(spec=spec),
        load_weights(resolve_model(str(directory)), spec, "float32"),
        cache,
        attention=ChosenAttention(backend=attention, name="flashinfer"),
    )
    return executor, reference


def make_requests(**sampling: Any) -> list[Request]:
    """Of prompts that end within, at and past a block's end."""
    draw = random.Random(3)
    lengths = (1, 15, 16, 17, 40, 63)
    return [
        Request(
            request_id=RequestId(f"r{index}"),
            prompt_token_ids=tuple(draw.randrange(VOCABULARY) for _ in range(length)),
            sampling=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "seed": index, **sampling}),
            arrival_s=0.0,
            deadline_s=1e9,
        )
        for index, length in enumerate(lengths)
    ]


def answers(executor: TorchExecutor, requests: list[Request]) -> list[Answer]:
    driver = EngineDriver(executor, max_sequences=6, chunk_tokens=48)
    return [choices[0] for choices in driver.answer(requests)]


def tokens(found: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in found]


@pytest.fixture(scope="module", params=["llama 3", "gemma 2", "gemma 3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), request.param)


def test_flashinfers_calls_and_replayed_graphs_give_the_tokens_of_the_cpus_kernels(directory: Path) -> None:
    expected = tokens(answers(make_executor(directory, num_blocks=NUM_BLOCKS), make_requests()))
    executor, _ = on_flashinfer(directory)
    assert tokens(answers(executor, make_requests())) == expected
    capturer = RerunCapturer()
    assert executor.stage.use_graphs(6, capturer)
    assert len(capturer.graphs) == len(ladder(6))
    before = capturer.num_replays
    assert tokens(answers(executor, make_requests())) == expected
    assert capturer.num_replays - before >= 7


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama 3")


def test_rows_with_noise_penalties_grammars_and_logprobs_are_rows_like_others(llama: Path) -> None:
    requests = [
        *make_requests(temperature=1.2, top_p=0.9)[:2],
        *make_requests(repetition_penalty=1.5)[2:4],
        *make_requests(grammar=Grammar(kind=GrammarKind.REGEX, text="[a-f]+"), stop_token_ids=(256,))[4:5],
        *make_requests(num_logprobs=3)[5:],
    ]
    plain, (executor, _) = make_executor(llama, num_blocks=NUM_BLOCKS), on_flashinfer(llama)
    executor.stage.use_graphs(6, RerunCapturer())
    with closing(plain.grammars), closing(executor.grammars):
        expected, found = answers(plain, requests), answers(executor, requests)
    assert tokens(found) == tokens(expected)
    for ours, theirs in zip(found[-1].steps, expected[-1].steps, strict=True):
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert ours.logprobs.top_ids == theirs.logprobs.top_ids
        assert ours.logprobs.top_logprobs == pytest.approx(theirs.logprobs.top_logprobs, abs=1e-4)


def test_a_batch_beyond_the_ladder_runs_without_a_graph(llama: Path) -> None:
    expected = tokens(answers(make_executor(llama, num_blocks=NUM_BLOCKS), make_requests()))
    executor, _ = on_flashinfer(llama)
    capturer = RerunCapturer()
    executor.stage.use_graphs(2, capturer)
    assert tokens(answers(executor, make_requests())) == expected
    assert len(capturer.graphs) == 2


def test_padding_leaves_all_blocks_but_its_own_alone(llama: Path) -> None:
    executor, _ = on_flashinfer(llama)
    executor.stage.use_graphs(4, RerunCapturer())
    assert executor.cache.num_blocks == NUM_BLOCKS - 1
    executor.cache.slab.fill_(0xFF)
    batch = [SequenceSlice(token_ids=[1], num_computed=0, block_ids=[BlockId(b)]) for b in (4, 9, 2)]
    executor.execute(batch)
    for layer in executor.cache.layers:
        written = layer[:, :, :, 0].isfinite().flatten(1).all(1).nonzero().squeeze(1).tolist()
        assert written == [2, 4, 9, NUM_BLOCKS - 1]
        assert not layer[:, :, :, 1:].isfinite().any()


def test_each_size_and_kind_of_layers_has_one_wrapper_and_all_read_the_same_tables(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor, reference = on_flashinfer(save_tiny(tmp_path_factory.mktemp("gemma"), "gemma 3"))
    executor.stage.use_graphs(4, RerunCapturer())
    num_kinds = len(executor.stage.model.kinds)
    assert num_kinds == 2
    assert {size: len(made) for size, made in reference.captured.items()} == dict.fromkeys(ladder(4), num_kinds)
    answers(executor, make_requests())
    assert {size: len(made) for size, made in reference.captured.items()} == dict.fromkeys(ladder(4), num_kinds)


def test_what_cannot_be_captured_is_left_as_it_is(llama: Path, tmp_path: Path) -> None:
    plain = make_executor(llama, num_blocks=NUM_BLOCKS)
    experts, _ = on_flashinfer(save_tiny(tmp_path, "mixtral"))
    for executor in (plain, experts):
        assert not executor.stage.use_graphs(4, RerunCapturer())
        assert executor.cache.num_blocks == NUM_BLOCKS

