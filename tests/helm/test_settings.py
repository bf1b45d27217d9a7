"""Values that no other test sets arrive where they belong: a place in the render for each, a render for many."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import yaml

from tests.helm.chart import Object, config, find, merged, render

POOL = {"topology": {"mode": "pool"}}
NVLINK = {"topology": {"mode": "mnnvl"}, "workers": {"gpu": {"count": 4}}}
GATEWAY = {"gateway": {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}}
TAINT = {"key": "gpu", "operator": "Exists"}
SPREAD = {
    "maxSkew": 1,
    "topologyKey": "zone",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"a": "b"}},
}
OUTSIDE = {"ipBlock": {"cidr": "10.1.0.0/16"}}

ROUTER, HEAD, NODE, VALKEY = "Deployment/-router", "Deployment/-head", "StatefulSet/-node", "StatefulSet/-valkey"
SECTIONS = {"router": ROUTER, "head": HEAD, "workers": NODE, "valkey": VALKEY}
RAY_CLUSTER = "RayCluster/-ray"
POD, CONTAINER = "spec.template.spec", "spec.template.spec.containers.0"
LIMIT = f"{CONTAINER}.resources.limits.cpu"
PEERS = f"{POD}.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution"
Case = tuple[dict[str, Any], str, str, Any]


def at(o: Any, path: str) -> Any:
    """What stands at a path of keys and positions."""
    for key in path.split("."):
        o = o[int(key)] if isinstance(o, list) else o[key]
    return o


def of_sections(key: str, value: Any, path: str, *sections: str) -> list[Case]:
    """One key that several kinds of pods have."""
    return [({section: {key: value}}, SECTIONS[section], path, value) for section in sections]


COMMON: list[Case] = [
    ({"image": {"pullPolicy": "Always"}}, ROUTER, f"{CONTAINER}.imagePullPolicy", "Always"),
    ({"valkey": {"image": {"pullPolicy": "Always"}}}, VALKEY, f"{CONTAINER}.imagePullPolicy", "Always"),
    ({"valkey": {"terminationGracePeriodSeconds": 7}}, VALKEY, f"{POD}.terminationGracePeriodSeconds", 7),
    *of_sections("tolerations", [TAINT], f"{POD}.tolerations", *SECTIONS),
    *of_sections("topologySpreadConstraints", [SPREAD], f"{POD}.topologySpreadConstraints", "router", "workers"),
    *of_sections("nodeSelector", {"a": "b"}, f"{POD}.nodeSelector", *SECTIONS),
    *of_sections("priorityClassName", "high", f"{POD}.priorityClassName", *SECTIONS),
    *of_sections("affinity", {"nodeAffinity": {}}, f"{POD}.affinity", *SECTIONS),
    *[({s: {"podLabels": {"a": "b"}}}, p, "spec.template.metadata.labels.a", "b") for s, p in SECTIONS.items()],
    *[({s: {"resources": {"cpuLimit": "3"}}}, p, LIMIT, "3") for s, p in SECTIONS.items()],
    ({"workers": {"metricsPort": 9999}}, NODE, f"{CONTAINER}.ports.0.containerPort", 9999),
    ({"workers": {"startupSeconds": 100}}, NODE, f"{CONTAINER}.startupProbe.failureThreshold", 20),
    ({"workers": {"maxUnavailable": 2}}, "PodDisruptionBudget/-node", "spec.maxUnavailable", 2),
    ({"router": {"maxUnavailable": 2}}, "PodDisruptionBudget/-router", "spec.maxUnavailable", 2),
    ({"head": {"metricsPort": 9998}}, HEAD, f"{CONTAINER}.ports.1.containerPort", 9998),
    ({"head": {"port": 6380}}, "Service/-head", "spec.ports.0.port", 6380),
    ({"router": {"httpPort": 8123}}, "Service/-router", "spec.ports.1.port", 8123),
    ({"router": {"httpPort": 8123}}, ROUTER, f"{CONTAINER}.ports.1.containerPort", 8123),
    ({"router": {"service": {"type": "NodePort"}}}, "Service/-router", "spec.type", "NodePort"),
    ({"router": {"service": {"annotations": {"lb": "x"}}}}, "Service/-router", "metadata.annotations.lb", "x"),
    ({"router": {"autoscaling": {"enabled": True}}}, "HorizontalPodAutoscaler/-router", "spec.maxReplicas", 10),
    ({"serviceAccounts": {"annotations": {"iam": "x"}}}, "ServiceAccount/-worker", "metadata.annotations.iam", "x"),
    ({"ingress": {"enabled": True, "host": "h", "className": "c"}}, "Ingress/-router", "spec.ingressClassName", "c"),
    ({"ingress": {"annotations": {"a": "b"}}}, "Ingress/-router", "metadata.annotations.a", "b"),
    (GATEWAY, "GRPCRoute/-router", "spec.rules.0.backendRefs.0", {"name": "demo-tandem-router", "port": 50051}),
    (GATEWAY, "HTTPRoute/-router", "spec.rules.0.backendRefs.0", {"name": "demo-tandem-router", "port": 8123}),
    (GATEWAY, "HTTPRoute/-router", "spec.hostnames", ["llm.example.com"]),
    ({"gateway": {"requestTimeout": "9s"}}, "HTTPRoute/-router", "spec.rules.0.timeouts.request", "9s"),
]
NEARNESS: list[Case] = [
    (
        {"workers": {"gpu": {"count": 2, "product": "L4", "productKey": "gpu.kind"}}},
        NODE,
        f"{POD}.nodeSelector",
        {"gpu.kind": "L4"},
    ),
    (
        {"topology": {"nvlinkDomainKey": "island"}, "workers": {"nvlinkDomain": "required"}},
        NODE,
        f"{PEERS}.0.topologyKey",
        "island",
    ),
    ({"topology": {"rackKey": "row"}, "workers": {"rack": "required"}}, NODE, f"{PEERS}.1.topologyKey", "row"),
]
DOMAIN: list[Case] = [
    (NVLINK, "StatefulSet/-decode", f"{PEERS}.0.topologyKey", "nvidia.com/gpu.clique"),
    ({"topology": {"computeDomain": {"name": "d"}}}, "ComputeDomain/-d", "spec.numNodes", 2),
]
OWN_DOMAIN: list[Case] = [
    (
        merged(NVLINK, {"topology": {"computeDomain": {"channelClaim": "own"}}}),
        "StatefulSet/-decode",
        f"{POD}.resourceClaims.0.resourceClaimTemplateName",
        "own",
    ),
]
RAY: list[Case] = [
    ({"kuberay": {"enabled": True}}, RAY_CLUSTER, "spec.rayVersion", "2.60.0"),
    *[
        ({"autoscaling": {"mode": "ray", "ray": {key: given}}}, RAY_CLUSTER, f"spec.autoscalerOptions.{key}", given)
        for key, given in (("idleTimeoutSeconds", 77), ("upscalingMode", "Conservative"))
    ],
    (
        {"head": {"controllerResources": {"cpuLimit": "3"}}},
        RAY_CLUSTER,
        "spec.headGroupSpec.template.spec.containers.1.resources.limits.cpu",
        "3",
    ),
    ({"networkPolicy": {"apiServer": [OUTSIDE]}}, "NetworkPolicy/-cluster", "spec.egress.3.to", [OUTSIDE]),
]
KEDA: list[Case] = [
    (
        {**POOL, "autoscaling": {"mode": "keda", "keda": {"prometheusAddress": "http://p:9090", key: value}}},
        f"ScaledObject/-{pool}",
        f"spec.{path}",
        expected,
    )
    for key, value, pool, path, expected in (
        ("pollingIntervalSeconds", 7, "decode", "pollingInterval", 7),
        ("cooldownSeconds", 77, "decode", "cooldownPeriod", 77),
        ("queuedPrefillTokensPerReplica", 500, "prefill", "triggers.0.metadata.threshold", "500"),
        ("ttftSeconds", 3, "prefill", "triggers.1.metadata.threshold", "3"),
        ("decodeOccupancy", 0.6, "decode", "triggers.0.metadata.threshold", "0.6"),
        ("decodeSequencesPerReplica", 9, "decode", "triggers.1.metadata.threshold", "9"),
    )
]
EXTERNAL: list[Case] = [
    (
        {
            "valkey": {"enabled": False},
            "externalRedis": {"url": "redis://r:6400", "networkPolicyPeers": [OUTSIDE]},
        },
        "NetworkPolicy/-router",
        "spec.egress.1",
        {"ports": [{"protocol": "TCP", "port": 6400}], "to": [OUTSIDE]},
    ),
    ({"nameOverride": "engine"}, ROUTER, "metadata.name", "demo-engine-router"),
]
NAMED: list[Case] = [({"fullnameOverride": "mine"}, ROUTER, "metadata.name", "mine-router")]
GROUPS = {
    "common": COMMON,
    "nearness": NEARNESS,
    "domain": DOMAIN,
    "own domain": OWN_DOMAIN,
    "ray": RAY,
    "keda": KEDA,
    "external": EXTERNAL,
    "named": NAMED,
}
CASES = [(group, case) for group, cases in GROUPS.items() for case in cases]


@functools.cache
def rendered(group: str) -> list[Object]:
    """With all values of a group at once."""
    return render(*(values for values, *_ in GROUPS[group]))


@pytest.mark.parametrize(("group", "case"), CASES, ids=lambda part: part if isinstance(part, str) else str(part[0]))
def test_a_value_arrives_where_it_belongs(group: str, case: Case) -> None:
    _, place, path, expected = case
    kind, _, name = place.partition("/")
    assert at(find(rendered(group), kind, name), path) == expected


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"model": {"servedName": "prod"}}, "model.served_name", "prod"),
        ({"router": {"httpPort": 8123}}, "router.http_port", 8123),
        ({"head": {"metricsPort": 9998}}, "controller_metrics_port", 9998),
    ],
)
def test_a_value_reaches_the_configuration(values: dict[str, Any], path: str, expected: Any) -> None:
    assert at(config(render(values)), path) == expected


def environment(o: Object) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in at(o, f"{CONTAINER}.env")}


def test_ucx_is_told_which_transports_and_devices_it_may_use() -> None:
    rdma = {"enabled": True, "ucxTls": "dc,self", "ucxNetDevices": "mlx5_2:1"}
    found = environment(find(render({"rdma": rdma}), "StatefulSet", "-node"))
    assert (found["UCX_TLS"], found["UCX_NET_DEVICES"]) == ("dc,self", "mlx5_2:1")


def test_redis_never_grows_beyond_what_its_container_may_have() -> None:
    text = find(render({"valkey": {"maxMemory": "99mb"}}), "ConfigMap", "-valkey")["data"]["valkey.conf"]
    assert "maxmemory 99mb" in text.splitlines()


def test_the_alert_on_slow_tokens_has_the_threshold_of_the_values() -> None:
    rules = find(render({"metrics": {"rules": {"enabled": True, "tbtSeconds": 0.7}}}), "PrometheusRule")
    (found,) = [rule for rule in rules["spec"]["groups"][0]["rules"] if "0.7" in yaml.safe_dump(rule["expr"])]
    assert "time_between_tokens" in found["expr"]
