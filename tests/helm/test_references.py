"""Whatever a render refers to is in the render, or is something that the values name as the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.helm.chart import Object, find, render
from tests.helm.references import dangling
from tests.helm.test_valid import CASES

OWN = {
    "one-node-8gpu": {"PersistentVolumeClaim/models"},
    "gb200": {"PersistentVolumeClaim/models"},
    "production": {
        "PersistentVolumeClaim/models",
        "Secret/tandem-redis",
        "Secret/tandem-redis-tls",
        "Secret/tandem-tls",
        "Secret/tandem-api-keys",
    },
    "keda": {"Secret/server", "Secret/client"},
    "everything": {"Secret/registry"},
    "without-valkey": {"Secret/redis", "Secret/redis-ca", "ServiceAccount/shared"},
}


@pytest.mark.parametrize("name", CASES)
def test_every_reference_resolves(name: str) -> None:
    assert dangling(render(CASES[name]), frozenset(OWN.get(name, set()))) == []


@pytest.mark.parametrize("name", OWN)
def test_what_the_user_brings_is_used(name: str) -> None:
    objects = render(CASES[name])
    for own in OWN[name]:
        assert any(own in text for text in dangling(objects, frozenset(OWN[name] - {own})))


def rename_service_port(objects: list[Object]) -> None:
    find(objects, "Service", "-router")["spec"]["ports"][0]["targetPort"] = "gprc"


def select_nothing(objects: list[Object]) -> None:
    find(objects, "PodDisruptionBudget", "-router")["spec"]["selector"]["matchLabels"]["x"] = "y"


def miss_target(objects: list[Object]) -> None:
    find(objects, "ScaledObject", "-decode")["spec"]["scaleTargetRef"]["name"] = "decode"


def own_replicas(objects: list[Object]) -> None:
    find(objects, "StatefulSet", "-decode")["spec"]["replicas"] = 3


def miss_key(objects: list[Object]) -> None:
    find(objects, "Secret", "-valkey")["data"] = {"passwort": ""}


def miss_volume(objects: list[Object]) -> None:
    find(objects, "StatefulSet", "-decode")["spec"]["template"]["spec"]["volumes"].pop()


def miss_monitor_port(objects: list[Object]) -> None:
    find(objects, "ServiceMonitor")["spec"]["endpoints"][0]["port"] = "metrics"


def miss_probe_port(objects: list[Object]) -> None:
    container = find(objects, "Deployment", "-router")["spec"]["template"]["spec"]["containers"][0]
    container["readinessProbe"]["grpc"]["port"] = 8082


@pytest.mark.parametrize(
    "breaks",
    [
        rename_service_port,
        select_nothing,
        miss_target,
        own_replicas,
        miss_key,
        miss_volume,
        miss_monitor_port,
        miss_probe_port,
    ],
)
def test_a_reference_that_does_not_resolve_is_found(breaks: Callable[[list[Object]], None]) -> None:
    objects = copy.deepcopy(render(CASES["keda"]))
    breaks(objects)
    assert dangling(objects, frozenset(OWN["keda"]))
