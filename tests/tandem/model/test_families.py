"""Every family gives the logits and the tokens of transformers, in chunks, in batches, and beyond its windows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tandem.model.choice import Choice
from tandem.model.executor import SequenceSlice
from tandem.model.files import resolve_model
from tandem.model.torch_executor import TorchExecutor
from tandem.types import BlockId, SamplingParams
from tests.engine_driver import EngineDriver
from tests.oracle import Oracle
from tests.tandem.model.conftest import make_executor
from tests.tiny_families import KINDS, WINDOW, save_tiny

GREEDY = SamplingParams(max_tokens=WINDOW + 8, temperature=0.0)
LENGTHS = (1, WINDOW, 3 * WINDOW + 5)
CHUNKS = (1, 30, 2, 41, 16, 10)
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model, in both implementations."""

    executor: TorchExecutor
    oracle: Oracle


@pytest.fixture(scope="module", params=KINDS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = save_tiny(tmp_path_factory.mktemp("model"), request.param)
    oracle = Oracle(resolve_model(str(directory)), attention=KINDS[request.param].attention)
    return Subject(executor=make_executor(directory, num_blocks=80), oracle=oracle)


def draw_prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(256) for _ in range(length)]


def test_logits_after_each_of_several_chunks_are_those_of_transformers(subject: Subject) -> None:
    prompt = draw_prompt(sum(CHUNKS))
    blocks = [BlockId(7 * i % 80) for i in range(subject.executor.cache.layout.num_blocks_for(len(prompt)))]
    rows, start = [], 0
    for size in CHUNKS:
        piece = SequenceSlice(
            token_ids=prompt[start : start + size],
            num_computed=start,
            block_ids=blocks,
            choices=[Choice(GREEDY)],
        )
        rows.append(subject.executor.logits([piece])[0])
        start += size
    with torch.inference_mode():
        every = subject.oracle.model(torch.tensor([prompt])).logits[0]
    ends = [sum(CHUNKS[: i + 1]) - 1 for i in range(len(CHUNKS))]
    torch.testing.assert_close(torch.stack(rows), every[ends], rtol=0.0, atol=TOLERANCE)


def test_greedy_tokens_are_those_of_transformers_alone_and_in_batches(subject: Subject) -> None:
    prompts = [draw_prompt(length) for length in LENGTHS]
    expected = [list(subject.oracle.tokens(prompt, GREEDY.max_tokens)) for prompt in prompts]
    assert any(len(set(tokens)) > GREEDY.max_tokens // 4 for tokens in expected), "a model that repeats shows nothing"
    alone = EngineDriver(subject.executor, max_sequences=1, chunk_tokens=512).run(prompts, GREEDY)
    together = EngineDriver(subject.executor, max_sequences=4, chunk_tokens=20).run(prompts, GREEDY)
    assert alone == expected
    assert together == expected
