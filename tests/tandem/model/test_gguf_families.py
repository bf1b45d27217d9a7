"""GGUF files of Llama and Qwen models give what transformers makes of the same weights; others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import ModelLoadError
from tandem.model.choice import Choice
from tandem.model.executor import SequenceSlice
from tandem.model.files import ModelFiles, resolve_model
from tandem.model.loader import load_spec
from tandem.types import BlockId, SamplingParams
from tests.oracle import Oracle
from tests.tandem.model.conftest import make_executor
from tests.tiny_families import save_tiny
from tests.tiny_gguf import save_gguf

LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {"llama 3": {}, "llama, linear": LINEAR, "qwen 2": {}, "qwen 3": {}}
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_gives_the_logits_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    directory = save_tiny(tmp_path / "model", kind)
    path = save_gguf(tmp_path / "model.gguf", directory, **KINDS[kind])
    executor = make_executor(path, num_blocks=6)
    prompt = [(37 * i + i * i) % 256 for i in range(90)]
    blocks = [BlockId(i) for i in (4, 2, 5, 0, 1, 3)]
    piece = SequenceSlice(token_ids=prompt, num_computed=0, block_ids=blocks, choices=[Choice(GREEDY)])
    with torch.inference_mode():
        expected = Oracle(resolve_model(str(directory))).model(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(executor.logits([piece]), expected, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope.scaling.type": "yarn"}, r"qwen3\.rope\.scaling\.type 'yarn' is not supported"),
        ({"expert_count": 8}, r"qwen3\.expert_count 8 is not supported"),
        ({"attention.sliding_window": 512}, r"qwen3\.attention\.sliding_window 512 is not supported"),
        ({"rope.dimension_count": 8}, r"qwen3\.rope\.dimension_count 8 is not supported"),
        ({"attention.value_length": 8}, r"qwen3\.attention\.value_length 8 is not supported"),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_named(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    path = save_gguf(tmp_path / "model.gguf", save_tiny(tmp_path / "model", "qwen 3"), **metadata)
    with pytest.raises(ModelLoadError, match=named):
        load_spec(ModelFiles(name="other", kind="gguf", weights=(path,), tokenizer_dir=tmp_path))
