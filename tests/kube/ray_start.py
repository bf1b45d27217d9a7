"""The `ray start` command line of a RayCluster's container, generated as the KubeRay operator does it. Decides only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tests.kube.kinds import Document
from tests.kube.pod_env import quantity

GCS_PORT = 6379
METRICS_PORT = 8080
AGENT_PORT = 52365
_USER, _PASSWORD = "REDIS_USERNAME", "REDIS_PASSWORD"
_ULIMIT = "ulimit -n 65536"
_OVERWRITE = "ray.io/overwrite-container-cmd"


def head_parameters(group: Mapping[str, Any], *, storage: Mapping[str, Any]) -> dict[str, str]:
    """What the head's `ray start` is told. `storage` are the options for keeping its state in a Redis."""
    access = {}
    if "redisUsername" in storage:
        access["redis-username"] = f"${_USER}"
    if "redisPassword" in storage:
        access["redis-password"] = f"${_PASSWORD}"
    given = {"dashboard-host": "0.0.0.0", **access, **group.get("rayStartParams", {})}
    return _common(given, ray_container(group["template"]), group)


def storage_environment(storage: Mapping[str, Any]) -> list[Document]:
    """The variables by which Ray's head finds that Redis."""
    env: list[Document] = []
    if address := storage.get("redisAddress"):
        env.append({"name": "RAY_REDIS_ADDRESS", "value": address})
    if namespace := storage.get("externalStorageNamespace"):
        env.append({"name": "RAY_external_storage_namespace", "value": namespace})
    for name, field in ((_USER, "redisUsername"), (_PASSWORD, "redisPassword")):
        if field in storage:
            env.append({"name": name, **storage[field]})
    return env


def worker_parameters(group: Mapping[str, Any], address: str) -> dict[str, str]:
    """What a worker's `ray start` is told. `address` is the head's, as host:port."""
    given = {"address": address, **group.get("rayStartParams", {})}
    return _common(given, ray_container(group["template"]), group)


def ray_container(template: Mapping[str, Any]) -> Document:
    """The one that runs Ray: always the first."""
    container: Document = template["spec"]["containers"][0]
    return container


def _common(given: dict[str, str], container: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, str]:
    found = {
        "block": "true",
        "metrics-export-port": str(METRICS_PORT),
        "dashboard-agent-listen-port": str(AGENT_PORT),
        **given,
    }
    if labels := group.get("labels"):
        found.setdefault("labels", ",".join(f"{key}={value}" for key, value in sorted(labels.items())))
    resources = container.get("resources", {})
    limits = {**resources.get("requests", {}), **resources.get("limits", {})}
    if "cpu" in limits:
        found.setdefault("num-cpus", str(math.ceil(quantity(str(limits["cpu"])))))
    if "memory" in resources.get("limits", {}):
        found.setdefault("memory", str(int(quantity(str(resources["limits"]["memory"])))))
    for name, amount in limits.items():
        if name.endswith("/gpu"):
            found.setdefault("num-gpus", str(amount))
    return found


def ray_start(parameters: Mapping[str, str], *, is_head: bool) -> str:
    """As one line for a shell, parameters in order of their names."""
    flags = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(parameters.items())]
    return " ".join(["ray start", *(["--head"] if is_head else []), *(flag for flag in flags if "=false" not in flag)])


def with_command(template: Mapping[str, Any], line: str) -> Document:
    """A template whose Ray container runs a line: after what it runs anyway, or not at all if it was asked not to."""
    container = ray_container(template)
    own = " ".join([*container.get("command", ()), *container.get("args", ())])
    if template.get("metadata", {}).get("annotations", {}).get(_OVERWRITE) == "true":
        return dict(template)
    script = f"{_ULIMIT}; {own} && {line}" if own else f"{_ULIMIT}; {line}"
    changed = {**container, "command": ["/bin/bash", "-c", "--"], "args": [script]}
    return {**template, "spec": {**template["spec"], "containers": [changed, *template["spec"]["containers"][1:]]}}
