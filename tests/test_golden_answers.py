"""Answers that are kept are used only for what they were asked of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.model.files import DEFAULT_MODEL, ModelFiles, resolve_model
from tests.golden_answers import as_text, golden_answers, origin

PROMPTS = {"one": [1, 2, 3], "other": [4]}
ANSWERS = {"one": (5, 6), "other": (7, 8)}


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(DEFAULT_MODEL)


def test_answers_come_back_as_they_were_written(files: ModelFiles, tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    file.write_text(as_text({"origin": origin(files, PROMPTS), "answers": ANSWERS}))
    assert golden_answers(files, PROMPTS, file=file) == ANSWERS


@pytest.mark.parametrize("what", ["weights", "transformers", "prompts"])
def test_answers_of_other_weights_versions_or_prompts_are_refused(files: ModelFiles, tmp_path: Path, what: str) -> None:
    file = tmp_path / "answers.json"
    file.write_text(as_text({"origin": {**origin(files, PROMPTS), what: "another"}, "answers": ANSWERS}))
    with pytest.raises(AssertionError, match="make golden"):
        golden_answers(files, PROMPTS, file=file)


def test_another_prompt_is_another_origin(files: ModelFiles) -> None:
    assert origin(files, PROMPTS) != origin(files, {**PROMPTS, "other": [5]})
    assert json.loads(as_text({"origin": origin(files, PROMPTS), "answers": {}}))["answers"] == {}
