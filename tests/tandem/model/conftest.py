"""The model under test, its oracle and the prompts; loaded once for the whole session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tandem.kv.layout import Dtype
from tandem.model.files import DEFAULT_MODEL, ModelFiles, resolve_model
from tandem.model.torch_executor import TorchExecutor, load_executor
from tests.golden_answers import golden_answers
from tests.oracle import Oracle
from tests.prompts import BLOCK_SIZE, prompt_token_ids


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One prompt's answer as it is kept; `logits` `[len(tokens), vocab]` are transformers' own before each token."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


def make_executor(source: str | Path, *, num_blocks: int, dtype: Dtype = "float32") -> TorchExecutor:
    def allocate(num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # NaN: nothing may be read before it is written

    return load_executor(
        str(source), dtype=dtype, block_size=BLOCK_SIZE, num_blocks=num_blocks, allocate=allocate, num_threads=1
    )


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2() -> TorchExecutor:
    return make_executor(DEFAULT_MODEL, num_blocks=520)


@pytest.fixture(scope="session")
def prompts(smollm2_files: ModelFiles) -> dict[str, list[int]]:
    return prompt_token_ids(AutoTokenizer.from_pretrained(smollm2_files.tokenizer_dir))


@pytest.fixture(scope="session")
def golden(smollm2_files: ModelFiles, prompts: dict[str, list[int]]) -> dict[str, Golden]:
    oracle, answers = Oracle(smollm2_files), golden_answers(smollm2_files, prompts)
    logits = {name: oracle.follow(prompts[name], tokens) for name, tokens in answers.items()}
    return {name: Golden(tokens=tokens, logits=logits[name]) for name, tokens in answers.items()}
