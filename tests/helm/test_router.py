"""The router's Services, routes and scaling: who is led where, and what is not led in at all."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rpc.tandem.v1 import inference_pb2
from tests.helm.chart import Object, find, kinds, pods, render
from tests.helm.metrics import exported
from tests.helm.references import matches

GATEWAY = {"gateway": {"parentRefs": [{"name": "public"}]}}


def services(*values: dict[str, Any]) -> dict[str, Object]:
    """The router's: for one of its pods, and for each."""
    found = [o for o in kinds(render(*values), "Service") if "-router" in o["metadata"]["name"]]
    return {o["metadata"]["labels"]["tandem.dev/endpoints"]: o["spec"] for o in found}


def test_routers_are_reached_through_one_address_and_one_by_one() -> None:
    found = services()
    assert (found["one"].get("clusterIP"), found["one"]["type"]) == (None, "ClusterIP")
    assert found["each"]["clusterIP"] == "None"
    for spec in found.values():
        selector = {"matchLabels": spec["selector"]}
        chosen = [name for name, pod in pods(render()) if matches(selector, pod["metadata"]["labels"])]
        assert chosen == ["Deployment/demo-tandem-router"]
        assert [(port["name"], port["port"]) for port in spec["ports"]] == [("grpc", 50051), ("http", 8000)]


@pytest.mark.parametrize(
    ("values", "protocols"),
    [({}, ["kubernetes.io/h2c", "http"]), ({"tls": {"secretName": "tls"}}, ["https", "https"])],
)
def test_services_say_which_protocol_gateways_must_speak(values: dict[str, Any], protocols: list[str]) -> None:
    for spec in services(values).values():
        assert [port["appProtocol"] for port in spec["ports"]] == protocols


def test_a_gateway_leads_in_requests_and_health_but_no_administration() -> None:
    (rule,) = find(render(GATEWAY), "GRPCRoute")["spec"]["rules"]
    known = {service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values()}
    asked = {match["method"]["service"] for match in rule["matches"]}
    assert asked == {"tandem.v1.Inference", "grpc.health.v1.Health"}
    assert "tandem.v1.Inference" in known
    assert known - asked
    (rule,) = find(render(GATEWAY), "HTTPRoute")["spec"]["rules"]
    assert [match["path"] for match in rule["matches"]] == [
        {"type": "PathPrefix", "value": "/v1"},
        {"type": "Exact", "value": "/health"},
    ]


@pytest.mark.parametrize(("left_out", "kept"), [("grpc", "HTTPRoute"), ("http", "GRPCRoute")])
def test_either_route_may_be_left_out(left_out: str, kept: str) -> None:
    routes = [o["kind"] for o in render(GATEWAY, {"gateway": {left_out: False}}) if o["kind"].endswith("Route")]
    assert routes == [kept]


def test_without_a_gateway_and_an_ingress_nothing_is_led_in() -> None:
    assert not [o for o in render() if o["kind"] in ("GRPCRoute", "HTTPRoute", "Ingress")]


def test_an_ingress_leads_requests_to_the_http_port_with_the_certificate_of_its_host() -> None:
    ingress = {"enabled": True, "host": "llm.example.com", "tlsSecretName": "web"}
    spec = find(render({"ingress": ingress}), "Ingress")["spec"]
    assert spec["tls"] == [{"secretName": "web", "hosts": ["llm.example.com"]}]
    (rule,) = spec["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"]) == ("llm.example.com", "/v1")
    assert path["backend"]["service"] == {"name": "demo-tandem-router", "port": {"name": "http"}}


def test_routers_scale_on_a_load_that_they_export_themselves() -> None:
    autoscaling = {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "cpuPercent": 55, "runningRequestsPerPod": 200}
    spec = find(render({"router": {"autoscaling": autoscaling}}), "HorizontalPodAutoscaler")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 9)
    assert spec["scaleTargetRef"]["name"] == "demo-tandem-router"
    cpu, running = spec["metrics"]
    assert cpu["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 55}}
    assert running["pods"]["target"] == {"type": "AverageValue", "averageValue": "200"}
    assert running["pods"]["metric"]["name"] in exported()
