"""The chart with the KubeRay operator: Ray's nodes are started by `ray start`, the controller sits beside the head.

The tests build on each other's deployment, in this order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.live import run
from tests.kube.deployment import CHART, Deployment, installed
from tests.kube.helm import Tools
from tests.kube.load import MODEL, ask_grpc, load_on
from tests.kube.marks import marks_of_processes
from tests.kube.stand_in import StandIn
from tests.kube.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PRESET = CHART / "presets" / "one-node-cpu.yaml"
NUM_NODES = 2
TAG, NEW_TAG = "0.1.0", "0.1.1"
SIZES = f"node.replicas={NUM_NODES},router.lingerSeconds=2,config.replacement_timeout_s=150"
VALUES = f"kuberay.enabled=true,image.tag={TAG},{SIZES}"


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


def test_another_image_comes_pod_by_pod_and_loses_no_request(
    live: Deployment, golden: tuple[int, ...], golden_text: str
) -> None:
    """As docs/kubernetes.md says: the operator leaves pods as they are, so the user deletes them, the head first.

    Of the nodes it is the one with the prefill worker; others would go the same way, and join as at the install.
    """
    old = {component: live.names(component) for component in ("head", "node")}
    (head,), node = old["head"], live.pod_of("prefill")
    with load_on(live.grpc, live.http, MODEL) as load:
        until(lambda: len(load.tokens) >= 2 and len(load.texts) >= 2)
        live.upgrade("--set", f"decode.replicas=2,image.tag={NEW_TAG}")
        assert {component: live.names(component) for component in old} == old
        live.tools.kubectl("delete", "pod", head)
        live.until_settled("head", 1)
        live.until_sizes(1, 2)
        live.tools.kubectl("delete", "pod", node)
        live.until_sizes(1, 2)
        until(lambda: len(live.pods("node")) == NUM_NODES)
    assert [live.tags(component) for component in ("router", "head", "node")] == [{NEW_TAG}, {NEW_TAG}, {NEW_TAG, TAG}]
    assert load.errors == []
    assert set(load.tokens) == {golden}
    assert set(load.texts) == {golden_text}


def test_an_uninstalled_ray_cluster_leaves_no_process(live: Deployment) -> None:
    pods = {pod["metadata"]["uid"] for pod in live.cluster.store.list("v1", "pods")}
    live.uninstall()
    assert not pods & {mark.split("/")[0] for mark in marks_of_processes()}
