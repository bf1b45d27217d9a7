"""The chart with the KubeRay operator: Ray's nodes are started by `ray start`, the controller sits beside the head.

The tests build on each other's deployment, in this order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.live import run
from tests.kube.deployment import CHART, Deployment, installed
from tests.kube.helm import Tools
from tests.kube.load import ask_grpc
from tests.kube.marks import marks_of_processes
from tests.kube.stand_in import StandIn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PRESET = CHART / "presets" / "one-node-cpu.yaml"
VALUES = "kuberay.enabled=true,router.lingerSeconds=2,config.pin_cores=false"


@pytest.fixture(scope="module")
def live(cluster: StandIn, tools: Tools, model: Path) -> Deployment:
    return installed(cluster, tools, model, "-f", str(PRESET), "--set", VALUES)


def test_a_ray_cluster_of_the_operator_serves(live: Deployment, golden: tuple[int, ...]) -> None:
    live.until_sizes(1, 1)
    assert run(ask_grpc(live.grpc)) == golden


def test_another_decode_size_starts_no_pod_and_no_prefill_worker_again(live: Deployment) -> None:
    prefill, nodes = live.workers("prefill"), live.uids("node")
    live.upgrade("--set", "decode.replicas=2")
    live.until_sizes(1, 2)
    assert (live.workers("prefill"), live.uids("node")) == (prefill, nodes)


def test_an_uninstalled_ray_cluster_leaves_no_process(live: Deployment) -> None:
    pods = {pod["metadata"]["uid"] for pod in live.cluster.store.list("v1", "pods")}
    live.uninstall()
    assert live.killed() == []
    assert not pods & {mark.split("/")[0] for mark in marks_of_processes()}
