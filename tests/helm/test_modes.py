"""Topologies and autoscaling: who owns how many pods there are, and that nobody else does."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cluster.ray_environment import _SETTINGS
from cluster.ray_node_settings import OBJECT_STORE_BYTES
from tests.helm.chart import Object, config, containers, find, kinds, pods, render, worker_pod

RAY = {"kuberay": {"enabled": True}}
POOL = {"topology": {"mode": "pool"}}
SIZES = {"prefill": {"replicas": 2, "maxReplicas": 4}, "decode": {"replicas": 3, "maxReplicas": 6}}
SIZES_NODE = {**SIZES, "node": {"prefillSlots": 4, "decodeSlots": 6}}
KEDA = {"autoscaling": {"mode": "keda", "keda": {"prometheusAddress": "http://p:9090"}}}


def mode(name: str) -> dict[str, Any]:
    return {"autoscaling": {"mode": name}}


def wanted(objects: list[Object]) -> dict[str, int]:
    sizes: dict[str, int] = yaml.safe_load(find(objects, "ConfigMap", "-sizes")["data"]["sizes.yaml"])
    return sizes


def groups(objects: list[Object]) -> dict[str, Object]:
    return {group["groupName"]: group for group in find(objects, "RayCluster")["spec"]["workerGroupSpecs"]}


def counts(group: Object) -> tuple[int | None, int, int]:
    return group.get("replicas"), group["minReplicas"], group["maxReplicas"]


def test_without_the_operator_each_pool_is_a_stateful_set() -> None:
    objects = render(POOL, SIZES)
    replicas = {o["metadata"]["name"]: o["spec"]["replicas"] for o in kinds(objects, "StatefulSet")}
    assert replicas == {"demo-tandem-prefill": 2, "demo-tandem-decode": 3, "demo-tandem-valkey": 1}
    assert not kinds(objects, "RayCluster")


def test_with_the_operator_each_pool_is_a_group() -> None:
    objects = render(RAY, POOL, SIZES)
    assert {name: counts(group) for name, group in groups(objects).items()} == {
        "prefill": (2, 2, 2),
        "decode": (3, 3, 3),
    }
    assert [o["metadata"]["name"] for o in kinds(objects, "StatefulSet")] == ["demo-tandem-valkey"]


@pytest.mark.parametrize("operator", [{}, RAY])
def test_whole_nodes_take_workers_of_both_pools(operator: dict[str, Any]) -> None:
    objects = render(operator, SIZES_NODE)
    assert "node" in [p["metadata"]["labels"]["app.kubernetes.io/component"] for _, p in pods(objects)]
    if operator:
        assert groups(objects)["node"]["rayStartParams"]["resources"] == r'"{\"tandem_decode\":6,\"tandem_prefill\":4}"'


def test_the_same_pod_runs_with_and_without_the_operator() -> None:
    def essence(objects: list[Object]) -> Object:
        spec = worker_pod(objects, "decode")["spec"]
        container = {
            k: v
            for k, v in spec["containers"][0].items()
            if k in ("image", "resources", "volumeMounts", "readinessProbe")
        }
        return {"container": container, "volumes": spec["volumes"], "security": spec["securityContext"]}

    assert essence(render(POOL)) == essence(render(POOL, RAY))


def test_mode_controller_has_pods_for_the_most_workers_and_starts_with_the_given() -> None:
    objects = render(POOL, SIZES, mode("controller"))
    assert find(objects, "StatefulSet", "-decode")["spec"]["replicas"] == 6
    assert wanted(objects) == {"prefill": 2, "decode": 3, "generation": 1}


def test_mode_ray_leaves_replicas_to_its_autoscaler() -> None:
    objects = render(RAY, POOL, SIZES, mode("ray"))
    assert {name: counts(group) for name, group in groups(objects).items()} == {
        "prefill": (None, 1, 4),
        "decode": (None, 1, 6),
    }
    assert find(objects, "RayCluster")["spec"]["enableInTreeAutoscaling"]
    assert {group["template"]["spec"]["restartPolicy"] for group in groups(objects).values()} == {"Never"}
    assert find(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"].get("restartPolicy") is None


def test_mode_ray_adds_whole_nodes() -> None:
    objects = render(RAY, {"node": {"replicas": 1, "maxReplicas": 3}}, mode("ray"))
    assert counts(groups(objects)["node"]) == (None, 1, 3)


def test_mode_keda_leaves_replicas_to_keda_and_wants_every_worker_that_finds_a_pod() -> None:
    objects = render(POOL, SIZES, KEDA)
    for name, most in (("prefill", 4), ("decode", 6)):
        assert "replicas" not in find(objects, "StatefulSet", f"-{name}")["spec"]
        scaled = find(objects, "ScaledObject", f"-{name}")["spec"]
        assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, most)
        assert wanted(objects)[name] == most


@pytest.mark.parametrize("name", ["none", "controller", "ray"])
def test_only_keda_s_mode_has_scaled_objects(name: str) -> None:
    assert not kinds(render(RAY, POOL, mode(name)), "ScaledObject")


def test_a_pool_of_no_workers_has_no_pod() -> None:
    objects = render(POOL, {"prefill": {"replicas": 0}})
    assert find(objects, "StatefulSet", "-prefill")["spec"]["replicas"] == 0


def test_routers_scale_on_their_own_load_and_then_own_their_replicas() -> None:
    objects = render({"router": {"autoscaling": {"enabled": True, "runningRequestsPerPod": 200}}})
    metrics = find(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert [metric["type"] for metric in metrics] == ["Resource", "Pods"]
    assert "replicas" not in find(objects, "Deployment", "-router")["spec"]


def test_ray_s_environment_is_that_of_processes_that_tandem_starts() -> None:
    for name, pod in pods(kinds(render(RAY, POOL), "RayCluster")):
        for container in (c for c in containers(pod) if c["name"] != "node-metrics"):
            environment = {v["name"]: v.get("value") for v in container["env"]}
            assert {key: environment.get(key) for key in _SETTINGS} == _SETTINGS, name
            assert "RAY_AUTH_TOKEN" in environment


def test_the_operator_s_pods_have_what_tandem_start_would_do() -> None:
    objects = render(RAY, POOL)
    names = [[c["name"] for c in containers(pod)] for _, pod in pods(kinds(objects, "RayCluster"))]
    assert names == [["ray-head", "controller"], ["ray-worker", "node-metrics"], ["ray-worker", "node-metrics"]]
    assert worker_pod(objects, "head")["spec"]["shareProcessNamespace"]


def test_ray_s_object_store_is_as_small_as_elsewhere() -> None:
    spec = find(render(RAY), "RayCluster")["spec"]
    params = [spec["headGroupSpec"]["rayStartParams"], *(g["rayStartParams"] for g in spec["workerGroupSpecs"])]
    assert {p["object-store-memory"] for p in params} == {str(OBJECT_STORE_BYTES)}


def test_a_busy_node_has_time_to_start_ray_s_agents() -> None:
    """A raylet waits 15 s for ports that its agents have chosen, and aborts; those that it was given it knows."""
    spec = find(render(RAY, POOL), "RayCluster")["spec"]
    for params in [spec["headGroupSpec"]["rayStartParams"], *(g["rayStartParams"] for g in spec["workerGroupSpecs"])]:
        ports = {params[name] for name in ("dashboard-agent-grpc-port", "runtime-env-agent-port")}
        assert len(ports) == 2
        assert all(0 < int(port) < 10000 for port in ports)  # below those of Ray's workers and the system's own


def test_node_labels_are_the_group_s_and_not_start_parameters() -> None:
    group = groups(render(RAY, {"workers": {"rayLabels": {"rack": "r7"}}}))["node"]
    assert group["labels"] == {"rack": "r7"}
    assert "labels" not in group["rayStartParams"]


def test_ray_keeps_its_state_in_the_cluster_s_redis_under_the_cluster_s_name() -> None:
    objects = render(RAY, {"config": {"cluster": "blue"}, "valkey": {"tls": {"secretName": "redis-tls"}}})
    kept = find(objects, "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert kept["redisAddress"] == "rediss://demo-tandem-valkey:6379"
    assert kept["redisUsername"] == {"value": "tandem"}
    assert kept["externalStorageNamespace"] == config(objects)["cluster"] == "blue"
