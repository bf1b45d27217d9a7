"""An API server takes what the chart renders: every preset and some more, strictly, on three versions of Kubernetes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.helm.chart import PRESETS, Object, find, preset, render
from tests.helm.validation import crd_problems, problems

VERSIONS = ("1.29", "1.33", "1.37")
RAY_VERSIONS = ("1.6.2", "1.7.0")
KEDA: dict[str, Any] = {
    "topology": {"mode": "pool"},
    "autoscaling": {"mode": "keda", "keda": {"prometheusAddress": "http://prometheus:9090"}},
    "ingress": {"enabled": True, "host": "llm.example.com", "tlsSecretName": "web"},
    "tls": {"secretName": "server", "clientCa": True, "clientSecretName": "client"},
    "metrics": {"serviceMonitor": {"enabled": True}},
}
EVERYTHING: dict[str, Any] = {
    "kuberay": {"enabled": True, "version": "1.7", "tls": True, "upgradeStrategy": "Recreate"},
    "topology": {"mode": "pool"},
    "rdma": {"enabled": True, "runAsRoot": True, "networks": "rail-0"},
    "model": {
        "source": "/models/m.gguf",
        "volume": {"type": "download", "sizeLimit": "20Gi", "download": {"repository": "o/m", "revision": "abc"}},
    },
    "workers": {
        "gpu": {"count": 8, "product": "H200"},
        "nvlinkDomain": "preferred",
        "rack": "required",
        "rayLabels": {"rack": "r7"},
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "initContainers": [{"name": "first", "image": "busybox:1.37", "command": ["true"]}],
    },
    "image": {"pullSecrets": ["registry"], "digest": "sha256:" + "a" * 64},
    "commonLabels": {"team": "inference"},
    "commonAnnotations": {"owner": "inference"},
    "valkey": {"persistence": {"enabled": True, "storageClassName": "fast"}},
    "networkPolicy": {"extraEgress": [{"ports": [{"protocol": "TCP", "port": 4317}]}]},
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}],
}
WITHOUT_VALKEY: dict[str, Any] = {
    "valkey": {"enabled": False},
    "externalRedis": {
        "url": "rediss://app@redis.example.com:6380/0",
        "passwordSecret": {"name": "redis"},
        "caSecret": {"name": "redis-ca"},
    },
    "serviceAccounts": {"create": False, "name": "shared"},
    "router": {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"]}},
    "workers": {"ssdTier": {"type": "none"}},
}
CASES = {name: preset(name) for name in PRESETS} | {
    "keda": KEDA,
    "everything": EVERYTHING,
    "without-valkey": WITHOUT_VALKEY,
}
RAY_CASES = [name for name, values in CASES.items() if values.get("kuberay", {}).get("enabled")]


@pytest.fixture(scope="module")
def renders() -> dict[str, list[Object]]:
    return {name: render(values) for name, values in CASES.items()}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_render_is_valid(name: str, version: str, renders: dict[str, list[Object]]) -> None:
    if CASES[name].get("topology", {}).get("mode") == "mnnvl" and version == "1.29":
        pytest.skip("resource claims are of later versions, and the chart says so")
    assert problems(renders[name], version) == []


@pytest.mark.parametrize("version", RAY_VERSIONS)
@pytest.mark.parametrize("name", RAY_CASES)
def test_a_ray_cluster_is_what_its_operator_takes(name: str, version: str, renders: dict[str, list[Object]]) -> None:
    if CASES[name]["kuberay"].get("version") == "1.7" and version != "1.7.0":
        pytest.skip("rendered for operators from 1.7 on")
    assert crd_problems(find(renders[name], "RayCluster"), version) == []


def broken(o: Object, path: str, value: Any) -> Object:
    changed = copy.deepcopy(o)
    *parents, last = path.split(".")
    inner: Any = changed
    for key in parents:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    return changed


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayCluster", "spec.workerGroupSpecs.0.replica", 1),
        ("RayCluster", "spec.workerGroupSpecs.0.minReplicas", "1"),
        ("RayCluster", "spec.headGroupSpec.rayStartParams.labels", "a=b"),
        ("RayCluster", "spec.headGroupSpec.template.spec.containers.0.securityContext.priviledged", True),
        ("StatefulSet", "spec.template.spec.volumes.0.emptydir", {}),
    ],
)
def test_a_mistake_in_a_render_is_found(kind: str, path: str, value: Any, renders: dict[str, list[Object]]) -> None:
    o = next(o for o in renders["everything"] if o["kind"] == kind)
    assert problems([o], "1.33") == []
    assert len(problems([broken(o, path, value)], "1.33")) == 1
