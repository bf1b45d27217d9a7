from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.model import native
from tandem.model.executor import SequenceSlice
from tandem.model.linear import packed
from tandem.model.native import kernels, why_missing
from tandem.model.torch_executor import TorchExecutor, load_executor
from tandem.types import BlockId
from tests.tiny_families import save_tiny


@pytest.fixture
def anew() -> Iterator[None]:
    """The kernels are looked for again, in the test and after it."""
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()


@pytest.mark.usefixtures("anew")
def test_kernels_that_were_not_built_are_said_once_and_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tandem.model.native._kernels", None)
    with caplog.at_level(logging.WARNING):
        assert kernels() is None
        assert kernels() is None
    assert len(caplog.records) == 1
    assert "_kernels" in str(why_missing())
    assert isinstance(packed(torch.ones(2, 2)), torch.Tensor)


def test_the_kernels_for_any_processor_give_what_those_for_this_one_give() -> None:
    chosen = "packed_product or rows_beside or gated or over_many_pieces or normed_rotated or moved_in"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    result = subprocess.run(
        [*command, str(Path(__file__).with_name("test_kernels.py"))],
        env={**os.environ, native.VARIABLE: "base", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert re.search(r"\d\d passed", result.stdout), result.stdout


def _executor(directory: Path) -> TorchExecutor:
    return load_executor(
        str(directory),
        dtype="float32",
        block_size=8,
        num_blocks=40,
        allocate=lambda num_bytes: torch.full((num_bytes,), 0xFF, dtype=torch.uint8),
        num_threads=1,
    )


def _last_rows(executor: TorchExecutor) -> torch.Tensor:
    """A prompt in two chunks and two tokens after it, beside another prompt."""
    from tandem.model.choice import Choice
    from tandem.types import SamplingParams

    choice = Choice(SamplingParams(max_tokens=9, temperature=0.0))
    blocks = [BlockId(i) for i in (9, 3, 30, 2, 17, 21, 8)]
    rows = []
    for start, end in ((0, 21), (21, 40), (40, 41), (41, 42)):
        ids = [(5 * i + 1) % 200 for i in range(start, end)]
        pieces = [SequenceSlice(token_ids=ids, num_computed=start, block_ids=blocks, choices=[choice])]
        if start == 40:
            pieces.append(
                SequenceSlice(token_ids=[7, 8, 9], num_computed=0, block_ids=[BlockId(1)], choices=[choice])
            )
        rows.append(executor.logits(pieces))
    return torch.cat(rows)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("name", ["llama 3", "qwen 2", "qwen 3", "gemma 2", "mixtral"])
def test_the_kernels_and_torch_make_the_same_of_a_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny(tmp_path, name)
    with_kernels = _last_rows(_executor(directory))
    assert why_missing() is None
    monkeypatch.setenv(native.VARIABLE, "torch")
    native._loaded.cache_clear()
    in_torch = _last_rows(_executor(directory))
    assert why_missing() == f"{native.VARIABLE}=torch"
    torch.testing.assert_close(with_kernels, in_torch, rtol=1e-3, atol=1e-3)
    assert torch.equal(with_kernels.argmax(-1), in_torch.argmax(-1))
