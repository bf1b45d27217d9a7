"""The prompts, and what transformers answers to them, for the tests against whole clusters."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tandem.model.files import DEFAULT_MODEL, ModelFiles, resolve_model
from tests.oracle import Oracle, golden_tokens
from tests.prompts import prompt_token_ids

MAX_TOKENS = 16


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def prompts(model_files: ModelFiles) -> dict[str, list[int]]:
    return prompt_token_ids(AutoTokenizer.from_pretrained(model_files.tokenizer_dir))


@pytest.fixture(scope="session")
def golden(
    model_files: ModelFiles, prompts: dict[str, list[int]], request: pytest.FixtureRequest
) -> dict[str, tuple[int, ...]]:
    oracle = Oracle(model_files, Path(request.config.cache.mkdir("tandem-oracle")))
    return {name: golden_tokens(oracle, ids, MAX_TOKENS) for name, ids in prompts.items()}
