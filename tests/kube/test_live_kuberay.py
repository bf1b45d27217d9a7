"""The chart with the KubeRay operator: Ray's nodes are started by `ray start`, the controller sits beside the head."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tandem.model.files import resolve_model
from tests.e2e.live import run
from tests.kube.deployment import CHART, Deployment, installed
from tests.kube.helm import Tools
from tests.kube.load import NUM_TOKENS, PROMPT, ask_grpc
from tests.kube.marks import marks_of_processes
from tests.kube.stand_in import StandIn
from tests.oracle import Oracle, golden_tokens
from tests.tiny_model import save_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PRESET = CHART / "presets" / "one-node-cpu.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_kv_heads=2)


@pytest.fixture(scope="module")
def live(cluster: StandIn, tools: Tools, model: Path) -> Deployment:
    return installed(cluster, tools, model, "-f", str(PRESET), "--set", "kuberay.enabled=true")


def test_a_ray_cluster_of_the_operator_serves_and_leaves_nothing(
    live: Deployment, model: Path, tmp_path: Path
) -> None:
    oracle = Oracle(resolve_model(str(model)), tmp_path)
    golden = golden_tokens(oracle, AutoTokenizer.from_pretrained(model).encode(PROMPT), NUM_TOKENS)
    live.until_sizes(1, 1)
    assert run(ask_grpc(live.grpc)) == golden
    prefill, nodes = live.workers("prefill"), live.uids("node")
    live.upgrade("--set", "decode.replicas=2")
    live.until_sizes(1, 2)
    assert (live.workers("prefill"), live.uids("node")) == (prefill, nodes)
    pods = {pod["metadata"]["uid"] for pod in live.cluster.store.list("v1", "pods")}
    live.uninstall()
    assert not pods & {mark.split("/")[0] for mark in marks_of_processes()}
