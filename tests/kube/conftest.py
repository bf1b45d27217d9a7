"""The stand-in and the tools against it, one of each for a module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.helm import Tools, find_tool
from tests.kube.stand_in import StandIn, stand_in

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
