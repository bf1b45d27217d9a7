"""The prompts, and what transformers answers to them, for the tests against whole clusters."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from tandem.model.files import DEFAULT_MODEL, ModelFiles, resolve_model
from tests.golden_answers import Answers, golden_answers
from tests.prompts import prompt_token_ids


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def prompts(model_files: ModelFiles) -> dict[str, list[int]]:
    return prompt_token_ids(AutoTokenizer.from_pretrained(model_files.tokenizer_dir))


@pytest.fixture(scope="session")
def golden(model_files: ModelFiles, prompts: dict[str, list[int]]) -> Answers:
    return golden_answers(model_files, prompts)
