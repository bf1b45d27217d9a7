"""A pod's status, made from what its containers are like: phase, conditions, and a line for each container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.kube.container import Container
from tests.kube.kinds import Document
from tests.kube.pod_env import NODE_IP
from tests.kube.pods import condition
from tests.kube.store import now_text


def phase(main: Sequence[Container], restart_policy: str) -> str:
    """Running until every container has ended for good."""
    if not all(container.exit_status is not None for container in main):
        return "Running"
    has_failed = any(container.exit_status for container in main)
    if restart_policy == "Always" or (restart_policy == "OnFailure" and has_failed):
        return "Running"
    return "Failed" if has_failed else "Succeeded"


def pod_status(
    pod: Mapping[str, Any], *, phase: str, pod_ip: str, init: Sequence[Container], main: Sequence[Container]
) -> Document:
    """What the API shows. Times of conditions stay while the conditions do."""
    is_initialized = phase != "Pending"
    sidecars = [container for container in init if container.spec.get("restartPolicy") == "Always"]
    is_ready = phase == "Running" and all(container.is_ready for container in [*sidecars, *main])
    return {
        "phase": phase,
        "hostIP": NODE_IP,
        "podIP": pod_ip,
        "podIPs": [{"ip": pod_ip}],
        "startTime": pod["metadata"]["creationTimestamp"],
        "conditions": [
            _condition(pod, "PodScheduled", True),
            _condition(pod, "Initialized", is_initialized),
            _condition(pod, "ContainersReady", is_ready),
            _condition(pod, "Ready", is_ready),
        ],
        "initContainerStatuses": [_container_status(container) for container in init],
        "containerStatuses": [_container_status(container) for container in main],
    }


def _condition(pod: Mapping[str, Any], name: str, holds: bool) -> Document:
    status = "True" if holds else "False"
    known = condition(pod, name)
    since = known["lastTransitionTime"] if known is not None and known["status"] == status else now_text()
    return {"type": name, "status": status, "lastTransitionTime": since}


def _container_status(container: Container) -> Document:
    return {
        "name": container.name,
        "image": container.spec["image"],
        "imageID": "",
        "ready": container.is_ready,
        "started": container.is_started,
        "restartCount": max(0, container.num_starts - 1),
        "state": _state(container),
    }


def _state(container: Container) -> Document:
    if container.is_running:
        return {"running": {}}
    if container.exit_status is None:
        return {"waiting": {"reason": "PodInitializing"}}
    reason = "Error" if container.exit_status else "Completed"
    return {"terminated": {"exitCode": container.exit_status, "reason": reason}}
