"""Whole outputs and their log-probabilities against transformers' own generation, on a small model in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.model.torch_executor import TorchExecutor
from tandem.types import Request, RequestId, SamplingParams
from tests.engine_driver import Answer, EngineDriver
from tests.pair import make_prompt
from tests.tandem.model.conftest import make_executor
from tests.tiny_model import save_tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("generation"), num_kv_heads=2)


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> TorchExecutor:
    return make_executor(model_dir, num_blocks=32)


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def answer(executor: TorchExecutor, prompt: list[int], **sampling: Any) -> Answer:
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **sampling})
    request = Request(
        request_id=RequestId("r"), prompt_token_ids=tuple(prompt), sampling=params, arrival_s=0.0, deadline_s=1e9
    )
    return EngineDriver(executor, max_sequences=1, chunk_tokens=16).answer([request])[0][0]


@pytest.mark.parametrize("penalty", [0.8, 1.3, 2.5])
def test_greedy_output_under_a_repetition_penalty_is_that_of_transformers(
    executor: TorchExecutor, theirs: Any, penalty: float
) -> None:
    prompt = make_prompt(23)
    ids = torch.tensor([prompt])
    expected = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert answer(executor, prompt, repetition_penalty=penalty).token_ids == expected[0, len(prompt) :].tolist()


def test_an_output_with_fewest_tokens_is_that_of_transformers(executor: TorchExecutor, theirs: Any) -> None:
    prompt = make_prompt(23)
    plain = answer(executor, prompt).token_ids
    stops = plain[1:4]
    ids = torch.tensor([prompt])
    expected = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        min_new_tokens=6,
        do_sample=False,
        eos_token_id=stops,
        pad_token_id=0,
    )
    ours = answer(executor, prompt, min_tokens=6, stop_token_ids=tuple(stops)).token_ids
    assert ours == expected[0, len(prompt) :].tolist()
    assert len(ours) > 6
    assert ours != plain[: len(ours)]


def test_log_probabilities_of_prompt_and_output_are_those_of_transformers(executor: TorchExecutor, theirs: Any) -> None:
    prompt = make_prompt(40)
    ours = answer(executor, prompt, num_logprobs=4, num_prompt_logprobs=3, repetition_penalty=1.5)
    tokens = prompt + ours.token_ids
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
    entries = [*ours.prompt_scores, *(step.logprobs for step in ours.steps)]
    assert len(entries) == len(tokens) - 1
    for position, entry in enumerate(entries):
        assert entry is not None
        row, count = logprobs[position], 3 if position < len(prompt) - 1 else 4
        assert entry.logprob == pytest.approx(float(row[tokens[position + 1]]), abs=1e-4)
        top = torch.topk(row, count)
        assert entry.top_ids == tuple(top.indices.tolist())
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
