"""The KubeRay operator's part: RayClusters become a head Pod, a head Service, and Pods of each worker group.

Not done: the in-tree autoscaler, the probes that the operator adds to containers without any, status beyond counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from tests.kube.kinds import Document
from tests.kube.pods import (
    create_pod,
    is_ending,
    is_over,
    is_ready,
    key_of,
    owned_pods,
    pod_key,
    random_name,
    reference,
    revision_of,
)
from tests.kube.ray_start import (
    GCS_PORT,
    head_parameters,
    ray_start,
    storage_environment,
    with_command,
    worker_parameters,
)
from tests.kube.store import Key, Store

API, PLURAL = "ray.io/v1", "rayclusters"
HEAD_GROUP = "headgroup"
_GROUP_LABEL, _REVISION = "ray.io/group", "ray.io/template-hash"
_TOKEN_KEY = "auth_token"
_TEMP_DIR = "$TMPDIR/ray"
"""Not the operator's doing: pods have a /tmp of their own, here it is one for all, and Ray would take its head's."""


def reconcile_ray_clusters(store: Store) -> None:
    """One step for each RayCluster."""
    for cluster in store.list(API, PLURAL):
        if not is_ending(cluster):
            _reconcile(store, cluster)


def head_service(cluster: Mapping[str, Any]) -> str:
    """The name of the Service in front of the head."""
    return f"{cluster['metadata']['name']}-head-svc"


def _address(cluster: Mapping[str, Any]) -> str:
    return f"{head_service(cluster)}.{cluster['metadata']['namespace']}.svc.cluster.local"


def _reconcile(store: Store, cluster: Document) -> None:
    _ensure_token(store, cluster)
    _ensure_service(store, cluster)
    pods = owned_pods(store, cluster)
    for pod in pods:
        if (is_over(pod) or _is_outdated(cluster, pod)) and not is_ending(pod):
            store.delete(key_of(pod), graceful=True)
    living = [pod for pod in pods if not is_ending(pod)]
    if not _in_group(pods, HEAD_GROUP):
        _create(store, cluster, cluster["spec"]["headGroupSpec"], is_head=True)
    for group in cluster["spec"].get("workerGroupSpecs", ()):
        _resize(store, cluster, group, _in_group(pods, group["groupName"]))
    _put_status(store, cluster, living)


def _is_outdated(cluster: Document, pod: Document) -> bool:
    """With the strategy Recreate, pods of another template are replaced; without it they stay."""
    is_asked = cluster["spec"].get("upgradeStrategy", {}).get("type") == "Recreate"
    return is_asked and pod["metadata"]["labels"].get(_REVISION) != _revision(cluster)


def _revision(cluster: Document) -> str:
    spec = deepcopy(cluster["spec"])
    for group in spec.get("workerGroupSpecs", ()):
        for name in ("replicas", "minReplicas", "maxReplicas", "scaleStrategy"):
            group.pop(name, None)
    return revision_of(spec)


def _in_group(pods: list[Document], group: str) -> list[Document]:
    return [pod for pod in pods if pod["metadata"]["labels"].get(_GROUP_LABEL) == group]


# --- pods


def _resize(store: Store, cluster: Document, group: Document, pods: list[Document]) -> None:
    """Ends the pods that were named, then makes or ends as many as are too few or too many.

    As with the operator, a pod on its way out counts until it is gone: its successor comes after it, not beside it.
    """
    pods = sorted(pods, key=is_ending, reverse=True)
    named = set(group.get("scaleStrategy", {}).get("workersToDelete", ()))
    for pod in pods:
        if pod["metadata"]["name"] in named and not is_ending(pod):
            store.delete(key_of(pod), graceful=True)
    rest = [pod for pod in pods if pod["metadata"]["name"] not in named]
    wanted = group.get("replicas", group["minReplicas"])
    wanted = max(group["minReplicas"], min(wanted, group["maxReplicas"])) * group.get("numOfHosts", 1)
    for _ in range(wanted - len(rest)):
        _create(store, cluster, group, is_head=False)
    for pod in rest[: max(0, len(rest) - wanted)]:
        if not is_ending(pod):
            store.delete(pod_key(pod["metadata"]["namespace"], pod["metadata"]["name"]), graceful=True)


def _create(store: Store, cluster: Document, group: Document, *, is_head: bool) -> None:
    name, kind = cluster["metadata"]["name"], "head" if is_head else "worker"
    group_name = HEAD_GROUP if is_head else group["groupName"]
    address = f"{_address(cluster)}:{GCS_PORT}"
    storage = cluster["spec"].get("gcsFaultToleranceOptions", {}) if is_head else {}
    parameters = head_parameters(group, storage=storage) if is_head else worker_parameters(group, address)
    line = ray_start({"temp-dir": _TEMP_DIR, **parameters}, is_head=is_head)
    template = with_command(deepcopy(group["template"]), line)
    own = {"RAY_NODE_TYPE_NAME": group_name, "KUBERAY_GEN_RAY_START_CMD": line}
    own["RAY_ADDRESS"] = f"127.0.0.1:{GCS_PORT}" if is_head else address
    _add_environment(cluster, template, own, storage_environment(storage))
    if not is_head:
        _wait_for_head(template, address)
    labels = {
        "ray.io/cluster": name,
        "ray.io/node-type": kind,
        _GROUP_LABEL: group_name,
        "ray.io/identifier": f"{name}-{kind}",
        "ray.io/is-ray-node": "yes",
        _REVISION: _revision(cluster),
    }
    pod = random_name(f"{name}-head" if is_head else f"{name}-{group_name}-worker")
    create_pod(store, cluster, pod, template=template, labels=labels)


def _add_environment(
    cluster: Document, template: Document, own: dict[str, str], storage: list[Document]
) -> None:
    """What the operator sets in the Ray container, where the user has not."""
    container = template["spec"]["containers"][0]
    values = {
        "FQ_RAY_IP": _address(cluster),
        "RAY_IP": head_service(cluster),
        "RAY_PORT": str(GCS_PORT),
        "RAY_CLUSTER_NAME": cluster["metadata"]["name"],
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        **own,
    }
    env: list[Document] = [*storage, *({"name": name, "value": value} for name, value in values.items())]
    env.append({"name": "RAY_CLOUD_INSTANCE_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    if _has_token(cluster):
        key = {"name": cluster["metadata"]["name"], "key": _TOKEN_KEY}
        env.append({"name": "RAY_AUTH_MODE", "value": "token"})
        env.append({"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": key}})
    known = {entry["name"] for entry in container.get("env", ())}
    container["env"] = [*container.get("env", ()), *(entry for entry in env if entry["name"] not in known)]


def _wait_for_head(template: Document, address: str) -> None:
    """Workers start when the head answers."""
    container = template["spec"]["containers"][0]
    script = f"until ray health-check --address {address} > /dev/null 2>&1; do echo waiting for the head; sleep 2; done"
    waiting = {
        "name": "wait-gcs-ready",
        "image": container["image"],
        "command": ["/bin/bash", "-c", "--"],
        "args": [script],
        "env": container["env"],
        "volumeMounts": container.get("volumeMounts", []),
    }
    template["spec"]["initContainers"] = [*template["spec"].get("initContainers", ()), waiting]


# --- what goes with them


def _has_token(cluster: Document) -> bool:
    return bool(cluster["spec"].get("authOptions", {}).get("mode") == "token")


def _ensure_token(store: Store, cluster: Document) -> None:
    metadata = cluster["metadata"]
    key = Key(api="v1", plural="secrets", namespace=metadata["namespace"], name=metadata["name"])
    if _has_token(cluster) and store.get(key) is None:
        secret = {"apiVersion": "v1", "kind": "Secret", "stringData": {_TOKEN_KEY: secrets.token_hex(32)}}
        store.create(key, {**secret, "metadata": {"name": key.name, "ownerReferences": [reference(cluster)]}})


def _ensure_service(store: Store, cluster: Document) -> None:
    metadata = cluster["metadata"]
    key = Key(api="v1", plural="services", namespace=metadata["namespace"], name=head_service(cluster))
    if store.get(key) is not None:
        return
    container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {port.get("name", str(port["containerPort"])): port["containerPort"] for port in container.get("ports", ())}
    ports.setdefault("gcs-server", GCS_PORT)
    selector = {"ray.io/cluster": metadata["name"], "ray.io/node-type": "head"}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [{"name": name, "port": port} for name, port in ports.items()],
    }
    service = {"apiVersion": "v1", "kind": "Service", "spec": spec}
    store.create(key, {**service, "metadata": {"name": key.name, "ownerReferences": [reference(cluster)]}})


def _put_status(store: Store, cluster: Document, pods: list[Document]) -> None:
    metadata = cluster["metadata"]
    workers = [pod for pod in pods if pod["metadata"]["labels"][_GROUP_LABEL] != HEAD_GROUP]
    status = {
        "observedGeneration": metadata["generation"],
        "state": "ready" if pods and all(is_ready(pod) for pod in pods) else "",
        "desiredWorkerReplicas": len(workers),
        "availableWorkerReplicas": sum(is_ready(pod) for pod in workers),
        "head": {"serviceName": head_service(cluster)},
    }
    key = Key(api=API, plural=PLURAL, namespace=metadata["namespace"], name=metadata["name"])
    store.set_status(key, status)
