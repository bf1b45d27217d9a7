"""The model under test, its oracle and the prompts; loaded once for the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tandem.kv.layout import Dtype
from tandem.model.files import DEFAULT_MODEL, ModelFiles, resolve_model
from tandem.model.torch_executor import TorchExecutor, load_executor
from tests.oracle import Golden, Oracle
from tests.prompts import BLOCK_SIZE, prompt_token_ids

MAX_TOKENS = 16


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
def oracle_dir(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.cache.mkdir("tandem-oracle"))


@pytest.fixture(scope="session")
def prompts(smollm2_files: ModelFiles) -> dict[str, list[int]]:
    return prompt_token_ids(AutoTokenizer.from_pretrained(smollm2_files.tokenizer_dir))


@pytest.fixture(scope="session")
def golden(smollm2_files: ModelFiles, oracle_dir: Path, prompts: dict[str, list[int]]) -> dict[str, Golden]:
    oracle = Oracle(smollm2_files, oracle_dir)
    return {name: oracle.answer(ids, MAX_TOKENS) for name, ids in prompts.items()}
