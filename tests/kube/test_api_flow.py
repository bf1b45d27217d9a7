"""helm and kubectl against the stand-in: a chart's whole life, with a small chart whose pods really serve."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.conftest import HERE
from tests.kube.helm import CommandFailed, Tools
from tests.kube.kinds import Document
from tests.kube.marks import marks_of_processes
from tests.kube.stand_in import StandIn, stand_in
from tests.kube.waiting import until

CHART = HERE / "charts" / "small"
FULL_DEFINITIONS = Path(__file__).resolve().parents[3] / "shared" / "crds"
RAY_CLUSTER: dict[str, Any] = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "some"},
    "spec": {
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": {"spec": {"containers": [{"name": "ray-head", "image": "tandem"}]}},
        }
    },
}


def install(tools: Tools, name: str, *arguments: str) -> None:
    tools.helm("install", name, CHART, "--wait", "--timeout", "60s", *arguments)


def pods_of(cluster: StandIn, release: str) -> list[Document]:
    pods = cluster.store.list("v1", "pods")
    return [pod for pod in pods if pod["metadata"].get("labels", {}).get("app") == release]


def site_of(cluster: StandIn, release: str) -> str:
    """What the Service answers."""
    service = next(found for found in cluster.store.list("v1", "services") if found["metadata"]["name"] == release)
    with urllib.request.urlopen(f"http://{service['spec']['clusterIP']}/", timeout=5) as answer:
        return str(answer.read().decode())


def uids(pods: list[Document]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def test_an_installed_chart_serves_when_helm_says_so(cluster: StandIn, tools: Tools) -> None:
    install(tools, "web", "--set", "replicas=2")
    assert len(pods_of(cluster, "web")) == 2
    assert site_of(cluster, "web") == "first"


def test_a_changed_config_map_reaches_the_pods_that_run(cluster: StandIn, tools: Tools) -> None:
    before = uids(pods_of(cluster, "web"))
    tools.helm("upgrade", "web", CHART, "--wait", "--reuse-values", "--set", "text=second")
    until(lambda: site_of(cluster, "web") == "second")
    assert uids(pods_of(cluster, "web")) == before


def test_a_changed_template_replaces_the_pods(cluster: StandIn, tools: Tools) -> None:
    before = uids(pods_of(cluster, "web"))
    tools.helm("upgrade", "web", CHART, "--wait", "--reuse-values", "--set", "ticket=new")
    until(lambda: len(pods_of(cluster, "web")) == 2)
    assert not uids(pods_of(cluster, "web")) & before


def test_the_test_of_a_chart_reaches_its_service_by_name(tools: Tools) -> None:
    assert "the site says second" in tools.helm("test", "web", "--logs")


def test_a_test_that_fails_is_told(tools: Tools) -> None:
    tools.helm("upgrade", "web", CHART, "--wait", "--reuse-values", "--set", "expected=something else")
    with pytest.raises(CommandFailed, match="test"):
        tools.helm("test", "web", "--timeout", "20s")


def test_a_rollback_brings_back_what_was(cluster: StandIn, tools: Tools) -> None:
    tools.helm("rollback", "web", "1", "--wait", "--timeout", "60s")
    until(lambda: site_of(cluster, "web") == "first")
    history = json.loads(tools.helm("history", "web", "-o", "json"))
    assert [entry["status"] for entry in history][-1] == "deployed"
    assert history[-1]["description"] == "Rollback to 1"


def test_kubectl_shows_scales_and_reads_logs(cluster: StandIn, tools: Tools) -> None:
    tools.kubectl("scale", "deployment/web", "--replicas=1")
    until(lambda: len(pods_of(cluster, "web")) == 1)
    (pod,) = pods_of(cluster, "web")
    assert pod["metadata"]["name"] in tools.kubectl("get", "pods", "-l", "app=web", "-o", "name")
    assert "GET / HTTP/1.1" in tools.kubectl("logs", pod["metadata"]["name"])


def test_an_uninstalled_chart_leaves_no_pod_and_no_process(cluster: StandIn, tools: Tools) -> None:
    marks = {pod["metadata"]["uid"] for pod in pods_of(cluster, "web")}
    tools.helm("uninstall", "web", "--wait")
    until(lambda: not pods_of(cluster, "web"))
    assert not marks & {value.split("/")[0] for value in marks_of_processes()}
    assert tools.helm("list", "-q").strip() == ""


def test_a_dry_run_on_the_server_creates_nothing(cluster: StandIn, tools: Tools) -> None:
    out = tools.helm("install", "dry", CHART, "--dry-run=server")
    assert "kind: Deployment" in out
    assert pods_of(cluster, "dry") == []
    assert tools.helm("list", "-q").strip() == ""


def apply(tools: Tools, tmp_path: Path, document: Document) -> str:
    path = tmp_path / "object.yaml"
    path.write_text(yaml.safe_dump(document))
    return tools.kubectl("apply", "--server-side", "--dry-run=server", "-f", path)


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("Deployment", {"replica": 1}, "replica"),
        ("StatefulSet", {"replicas": "two"}, "replicas"),
        ("Service", {"ports": [{"port": "http"}]}, "port"),
    ],
)
def test_a_field_that_does_not_exist_or_fit_is_refused(
    tools: Tools, tmp_path: Path, kind: str, spec: Document, message: str
) -> None:
    api = "v1" if kind == "Service" else "apps/v1"
    with pytest.raises(CommandFailed, match=message):
        apply(tools, tmp_path, {"apiVersion": api, "kind": kind, "metadata": {"name": "bad"}, "spec": spec})


def with_field(path: str, value: Any) -> Document:
    changed = json.loads(json.dumps(RAY_CLUSTER))
    *way, last = path.split(".")
    place = changed["spec"]
    for name in way:
        place = place[name]
    place[last] = value
    return dict(changed)


BAD_FIELDS: list[tuple[str, Any]] = [
    ("headGroupSpec.rayStartParam", {}),
    ("headGroupSpec.rayStartParams", {"num-cpus": 0}),
    ("workerGroupSpecs", [{"groupName": "decode"}]),
    ("workerGroups", []),
]


def refuses_what_is_wrong(tools: Tools, tmp_path: Path) -> None:
    assert "rayclusters.ray.io/some" in apply(tools, tmp_path, RAY_CLUSTER).replace("raycluster.ray", "rayclusters.ray")
    for path, value in BAD_FIELDS:
        with pytest.raises(CommandFailed, match="invalid"):
            apply(tools, tmp_path, with_field(path, value))


def test_a_bad_ray_cluster_is_refused(tools: Tools, tmp_path: Path) -> None:
    refuses_what_is_wrong(tools, tmp_path)


@pytest.mark.parametrize("version", ["1.6.2", "1.7.0"])
def test_a_bad_ray_cluster_is_refused_by_the_operators_own_schema(
    version: str, tmp_path: Path, tools: Tools
) -> None:
    path = FULL_DEFINITIONS / f"rayclusters_v{version}.yaml"
    if not path.exists():
        pytest.skip("the operator's definitions are not here")
    with stand_in(tmp_path / "logs", definitions=[path]) as other:
        refuses_what_is_wrong(Tools(kubeconfig=other.kubeconfig(tmp_path / "config"), home=tools.home), tmp_path)


