"""The stand-in, the tools against it and the model that the chart's tests deploy, one of each for a module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tandem.model.files import resolve_model
from tests.kube.helm import Tools, find_tool
from tests.kube.load import MODEL, NUM_TOKENS, PROMPT
from tests.kube.stand_in import StandIn, stand_in
from tests.oracle import Oracle
from tests.tiny_model import save_tiny_llama

HERE = Path(__file__).parent
DEFINITIONS = (HERE / "definitions" / "raycluster.yaml", HERE / "definitions" / "others.yaml")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here: pods get their addresses through a small library")
    with stand_in(tmp_path_factory.mktemp("kube-logs"), definitions=DEFINITIONS) as started:
        yield started


@pytest.fixture(scope="module")
def tools(cluster: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Tools:
    find_tool("helm")
    find_tool("kubectl")
    home = tmp_path_factory.mktemp("kube-home")
    return Tools(kubeconfig=cluster.kubeconfig(home / "config"), home=home)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / MODEL, num_kv_heads=2)


@pytest.fixture(scope="module")
def golden(model: Path) -> tuple[int, ...]:
    """The tokens that answer the clients' prompt."""
    prompt_ids = AutoTokenizer.from_pretrained(model).encode(PROMPT)
    return Oracle(resolve_model(str(model))).tokens(prompt_ids, NUM_TOKENS)


@pytest.fixture(scope="module")
def golden_text(model: Path, golden: tuple[int, ...]) -> str:
    """The same as a text."""
    return str(AutoTokenizer.from_pretrained(model).decode(golden, skip_special_tokens=True))
