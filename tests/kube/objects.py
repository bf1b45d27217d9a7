"""Kubernetes objects for the tests of the stand-in, and putting them into it without helm."""

from __future__ import annotations

import sys
from typing import Any

from tests.kube.kinds import Document
from tests.kube.pods import pod_key
from tests.kube.stand_in import StandIn
from tests.kube.store import Key
from tests.kube.waiting import until

PYTHON = sys.executable


def container(*command: str, name: str = "main", **fields: Any) -> Document:
    """A container with a command."""
    return {"name": name, "image": "python", "command": list(command), **fields}


def pod(name: str, *containers: Document, labels: dict[str, str] | None = None, **spec: Any) -> Document:
    """A pod that runs until it is told to end."""
    metadata = {"name": name, "labels": labels or {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": list(containers), **spec}}


def service(name: str, *, app: str, port: int = 80, target: int = 8080) -> Document:
    """A Service before the pods of an app."""
    spec = {"selector": {"app": app}, "ports": [{"port": port, "targetPort": target}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def named(kind: str, name: str, **fields: Any) -> Document:
    """An object of a kind that is not a pod or a Service."""
    apis = {"Job": "batch/v1", "Deployment": "apps/v1", "StatefulSet": "apps/v1"}
    return {"apiVersion": apis.get(kind, "v1"), "kind": kind, "metadata": {"name": name}, **fields}


def key(cluster: StandIn, document: Document) -> Key:
    """Where an object is to be."""
    kind = cluster.store.kinds.of(document)
    assert kind is not None
    return Key(api=kind.api, plural=kind.plural, namespace="default", name=document["metadata"]["name"])


def put(cluster: StandIn, *documents: Document) -> None:
    """Creates objects."""
    for document in documents:
        cluster.store.create(key(cluster, document), document)


def end(cluster: StandIn, *names: str) -> None:
    """Deletes pods and waits until they are gone."""
    for name in names:
        cluster.store.delete(pod_key("default", name), graceful=True)
    until(lambda: all(cluster.store.get(pod_key("default", name)) is None for name in names))


def status_of(cluster: StandIn, name: str) -> Document:
    """A pod's status; empty before it has one."""
    found = cluster.store.get(pod_key("default", name))
    return {} if found is None else found.get("status", {})


def until_phase(cluster: StandIn, name: str, phase: str) -> None:
    """Waits until a pod is in a phase."""
    until(lambda: status_of(cluster, name).get("phase") == phase, what=lambda: status_of(cluster, name))


def log_of(cluster: StandIn, name: str, container: str = "main") -> str:
    """What a pod's container has written; also after its end."""
    path = cluster.kubelet.log_path(pod_key("default", name), container)
    return path.read_text() if path.exists() else ""
