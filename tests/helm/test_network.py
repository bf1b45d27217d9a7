"""Network policies: nothing is open but what processes need, evaluated as Kubernetes would."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import Object, kinds, pods, preset, render
from tests.helm.references import matches

RELEASE = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/instance": "demo"}
OUTSIDE = {"app": "client"}


def of(component: str) -> dict[str, str]:
    return {**RELEASE, "app.kubernetes.io/component": component}


def is_allowed(objects: list[Object], source: dict[str, str], target: dict[str, str], port: str | int) -> bool:
    """Whether pods with the first labels reach those with the second, within the release's namespace."""
    out = _direction(objects, source, target, port, kind="Egress", peers="to")
    return out and _direction(objects, target, source, port, kind="Ingress", peers="from")


def _direction(
    objects: list[Object], subject: dict[str, str], peer: dict[str, str], port: str | int, *, kind: str, peers: str
) -> bool:
    specs = [o["spec"] for o in kinds(objects, "NetworkPolicy")]
    chosen = [s for s in specs if kind in s["policyTypes"] and matches(s["podSelector"], subject)]
    rules = [rule for s in chosen for rule in s.get(kind.lower(), [])]
    return not chosen or any(_takes(rule, peer, port, peers) for rule in rules)


def _takes(rule: dict[str, Any], peer: dict[str, str], port: str | int, peers: str) -> bool:
    ports = [p["port"] for p in rule.get("ports", [])]
    given = rule.get(peers, [])
    same_namespace = [p for p in given if "namespaceSelector" not in p]
    from_anywhere = not given
    has_peer = from_anywhere or any(matches(p["podSelector"], peer) for p in same_namespace)
    return (not ports or port in ports) and has_peer


ALLOWED = [
    ("router", "node", 40001),
    ("node", "node", 40001),
    ("node", "head", 6379),
    ("head", "node", 40001),
    ("router", "valkey", 6379),
    ("head", "valkey", 6379),
    ("node", "valkey", 6379),
]
FORBIDDEN = [
    ("node", "router", 50051),
    ("router", "head", 6379),
    ("test", "node", 40001),
    ("test", "valkey", 6379),
    ("valkey", "node", 40001),
    ("valkey", "router", 50051),
]


@pytest.fixture(scope="module")
def policies() -> list[Object]:
    return render()


def named(component: str, port: int, *, incoming: bool) -> str | int:
    """Ingress rules name ports, egress rules number them: the number stands for either."""
    names = {("valkey", 6379): "redis", ("router", 50051): "grpc", ("router", 8000): "http"}
    return names.get((component, port), port) if incoming else port


def reaches(objects: list[Object], source: dict[str, str], component: str, port: int) -> bool:
    target = of(component)
    out = any(
        _direction(objects, source, target, p, kind="Egress", peers="to")
        for p in (port, named(component, port, incoming=True))
    )
    into = any(
        _direction(objects, target, source, p, kind="Ingress", peers="from")
        for p in (port, named(component, port, incoming=True))
    )
    return out and into


@pytest.mark.parametrize(("source", "target", "port"), ALLOWED)
def test_processes_reach_whom_they_need(policies: list[Object], source: str, target: str, port: int) -> None:
    assert reaches(policies, of(source), target, port)


@pytest.mark.parametrize(("source", "target", "port"), FORBIDDEN)
def test_processes_reach_nobody_else(policies: list[Object], source: str, target: str, port: int) -> None:
    assert not reaches(policies, of(source), target, port)


@pytest.mark.parametrize("source", ["prefill", "decode"])
@pytest.mark.parametrize("target", ["prefill", "decode"])
def test_workers_and_stores_of_both_pools_reach_each_other_on_any_port(source: str, target: str) -> None:
    assert reaches(render({"topology": {"mode": "pool"}}), of(source), target, 49999)


def test_clients_reach_the_router_s_two_ports_and_nothing_else(policies: list[Object]) -> None:
    assert reaches(policies, OUTSIDE, "router", 50051)
    assert reaches(policies, OUTSIDE, "router", 8000)
    for component, port in (("router", 8081), ("node", 40001), ("head", 6379), ("valkey", 6379)):
        assert not reaches(policies, OUTSIDE, component, port)


def test_the_test_pod_reaches_the_router(policies: list[Object]) -> None:
    assert reaches(policies, of("test"), "router", 50051)
    assert reaches(policies, of("test"), "router", 8000)


def test_named_clients_leave_others_out_but_not_the_test() -> None:
    objects = render({"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]}})
    assert reaches(objects, {"app": "gateway"}, "router", 50051)
    assert not reaches(objects, OUTSIDE, "router", 50051)
    assert reaches(objects, of("test"), "router", 50051)


def test_monitoring_reaches_metrics_when_it_is_named() -> None:
    scraper = {"app": "prometheus"}
    assert not _direction(render(), of("node"), scraper, "tandem-metrics", kind="Ingress", peers="from")
    objects = render({"networkPolicy": {"monitoring": [{"podSelector": {"matchLabels": scraper}}]}})
    for component in ("node", "head"):
        assert _direction(objects, of(component), scraper, "tandem-metrics", kind="Ingress", peers="from")


@pytest.mark.parametrize("name", ["one-node-cpu", "rdma-nodes", "production", "gb200"])
def test_every_pod_is_under_a_policy_both_ways(name: str) -> None:
    objects = render(preset(name))
    for where, pod in pods(objects):
        chosen = [
            o["spec"]["policyTypes"]
            for o in kinds(objects, "NetworkPolicy")
            if matches(o["spec"]["podSelector"], pod["metadata"]["labels"])
        ]
        assert {kind for kinds_of in chosen for kind in kinds_of} == {"Ingress", "Egress"}, where


def test_only_ray_s_autoscaler_reaches_the_api_server() -> None:
    def asks(objects: list[Object]) -> bool:
        return any(
            {"protocol": "TCP", "port": 6443} in r.get("ports", [])
            for o in kinds(objects, "NetworkPolicy")
            for r in o["spec"].get("egress", [])
        )

    assert asks(render(preset("production")))
    assert not asks(render(preset("gb200")))


def test_policies_may_be_left_out() -> None:
    assert not kinds(render({"networkPolicy": {"enabled": False}}), "NetworkPolicy")
