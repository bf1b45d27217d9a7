"""Finds what a render refers to and does not have: selectors, targets, Secrets, ConfigMaps, claims, volumes, ports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.helm.chart import Object, containers, kinds, pods


def dangling(objects: list[Object], outside: frozenset[str] = frozenset()) -> list[str]:
    """Every reference that does not resolve. `outside` are objects ("Secret/name") that the user brings."""
    have = {f"{o['kind']}/{o['metadata']['name']}" for o in objects} | outside
    claims = {f"{o['kind']}/{o['metadata']['name']}": _claims(o) for o in objects}
    found = [text for name, pod in pods(objects) for text in _in_pod(name, pod, have, claims.get(name, set()))]
    return (
        found + _selectors(objects) + _targets(objects, have) + _keys(objects) + _monitors(objects) + _routes(objects)
    )


def _claims(o: Object) -> set[str]:
    return {claim["metadata"]["name"] for claim in o.get("spec", {}).get("volumeClaimTemplates", [])}


def _in_pod(name: str, pod: Object, have: set[str], claims: set[str]) -> Iterator[str]:
    spec = pod["spec"]
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    mounted = {mount["name"] for c in containers(pod) for mount in c.get("volumeMounts", [])}
    yield from (f"{name}: mounts {volume}, which is no volume" for volume in mounted - set(volumes) - claims)
    yield from (f"{name}: nobody mounts {volume}" for volume in set(volumes) - mounted)
    wanted = [*_of_volumes(volumes.values()), *_of_environment(pod)]
    account = spec.get("serviceAccountName")
    wanted += [f"ServiceAccount/{account}"] if account else []
    wanted += [f"Secret/{secret['name']}" for secret in spec.get("imagePullSecrets", [])]
    yield from (f"{name}: {reference} is not there" for reference in wanted if reference not in have)
    yield from _ports(name, pod)


def _of_volumes(volumes: Any) -> Iterator[str]:
    for volume in volumes:
        if "configMap" in volume:
            yield f"ConfigMap/{volume['configMap']['name']}"
        elif "secret" in volume:
            yield f"Secret/{volume['secret']['secretName']}"
        elif "persistentVolumeClaim" in volume:
            yield f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}"


def _of_environment(pod: Object) -> Iterator[str]:
    for container in containers(pod):
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                yield f"Secret/{source['secretKeyRef']['name']}"
            if "configMapKeyRef" in source:
                yield f"ConfigMap/{source['configMapKeyRef']['name']}"


def _ports(name: str, pod: Object) -> Iterator[str]:
    """Probes ask ports that their container has; a name stands for one port of the pod."""
    names = [port["name"] for c in containers(pod) for port in c.get("ports", [])]
    yield from (f"{name}: two ports are called {port}" for port in set(names) if names.count(port) > 1)
    for container in containers(pod):
        own = {port[key] for port in container.get("ports", []) for key in ("name", "containerPort")}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container.get(kind, {})
            for way in ("tcpSocket", "grpc", "httpGet"):
                if way in probe and probe[way]["port"] not in own:
                    yield f"{name}: {kind} asks port {probe[way]['port']}"


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes an object with these labels."""
    expressions = selector.get("matchExpressions", [])
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(e["key"]) in e["values"] for e in expressions if e["operator"] == "In"
    )


def _labels(pod: Object) -> dict[str, str]:
    labels: dict[str, str] = pod["metadata"].get("labels", {})
    return labels


def _selectors(objects: list[Object]) -> list[str]:
    """Services, budgets, policies and workloads select some pod; a Service's target ports are ports of all of them."""
    found = []
    all_pods = [pod for _, pod in pods(objects)]
    for o in objects:
        name, spec = f"{o['kind']}/{o['metadata']['name']}", o.get("spec", {})
        selector = {
            "Service": {"matchLabels": spec.get("selector", {})},
            "PodDisruptionBudget": spec.get("selector"),
            "NetworkPolicy": spec.get("podSelector"),
            "Deployment": spec.get("selector"),
            "StatefulSet": spec.get("selector"),
        }.get(o["kind"])
        if selector is None:
            continue
        chosen = [pod for pod in all_pods if matches(selector, _labels(pod))]
        if not chosen:
            found.append(f"{name}: selects no pod")
        if o["kind"] == "Service":
            found += _target_ports(name, spec, chosen)
        if o["kind"] in ("Deployment", "StatefulSet") and spec["template"] not in chosen:
            found.append(f"{name}: does not select its own pods")
    return found


def _target_ports(name: str, spec: Object, chosen: list[Object]) -> list[str]:
    named = [{port["name"] for c in containers(pod) for port in c.get("ports", [])} for pod in chosen]
    wanted = [port["targetPort"] for port in spec["ports"]]
    return [f"{name}: a pod has no port {port}" for port in wanted for names in named if port not in names]


def _targets(objects: list[Object], have: set[str]) -> list[str]:
    found = []
    for o in objects:
        spec = o.get("spec", {})
        name = f"{o['kind']}/{o['metadata']['name']}"
        if "scaleTargetRef" in spec:
            target = f"{spec['scaleTargetRef']['kind']}/{spec['scaleTargetRef']['name']}"
            found += [] if target in have else [f"{name}: {target} is not there"]
            owned = [t for t in objects if f"{t['kind']}/{t['metadata']['name']}" == target]
            found += [f"{name}: {target} has replicas of its own" for t in owned if "replicas" in t["spec"]]
        if o["kind"] == "StatefulSet" and f"Service/{spec['serviceName']}" not in have:
            found.append(f"{name}: Service/{spec['serviceName']} is not there")
    return found


def _keys(objects: list[Object]) -> list[str]:
    """Keys of Secrets and ConfigMaps that the render has."""
    data = {f"{o['kind']}/{o['metadata']['name']}": o.get("data", {}) for o in objects if "data" in o}
    found = []
    for name, pod in pods(objects):
        for container in containers(pod):
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference and reference["key"] not in data.get(
                    f"Secret/{reference['name']}", {reference["key"]: ""}
                ):
                    found.append(f"{name}: Secret/{reference['name']} has no key {reference['key']}")
            sources = {v["name"]: v.get("configMap", {}).get("name") for v in pod["spec"].get("volumes", [])}
            for mount in container.get("volumeMounts", []):
                known = data.get(f"ConfigMap/{sources.get(mount['name'])}", {mount.get("subPath"): ""})
                if "subPath" in mount and mount["subPath"] not in known:
                    found.append(f"{name}: {mount['name']} has no key {mount['subPath']}")
    return found


def _monitors(objects: list[Object]) -> list[str]:
    found = []
    for o in kinds(objects, "ServiceMonitor"):
        services = [s for s in kinds(objects, "Service") if matches(o["spec"]["selector"], s["metadata"]["labels"])]
        ports = {endpoint["port"] for endpoint in o["spec"]["endpoints"]}
        named = [{port["name"] for port in s["spec"]["ports"]} for s in services]
        if len(services) != 1 or not ports <= named[0]:
            found.append(f"ServiceMonitor/{o['metadata']['name']}: selects {len(services)} Services, ports {ports}")
    for o in kinds(objects, "PodMonitor"):
        chosen = [pod for _, pod in pods(objects) if matches(o["spec"]["selector"], _labels(pod))]
        ports = {endpoint["port"] for endpoint in o["spec"]["podMetricsEndpoints"]}
        named = [{port["name"] for c in containers(pod) for port in c.get("ports", [])} for pod in chosen]
        if not chosen or not all(ports <= names for names in named):
            found.append(f"PodMonitor/{o['metadata']['name']}: selects {len(chosen)} pods, ports {ports}")
    return found


def _routes(objects: list[Object]) -> list[str]:
    services = {s["metadata"]["name"]: s for s in kinds(objects, "Service")}
    found = []
    for o in objects:
        name = f"{o['kind']}/{o['metadata']['name']}"
        for backend in _backends(o):
            ports = services.get(backend["name"], {}).get("spec", {}).get("ports", [])
            if not any(backend["port"] in (port["name"], port["port"]) for port in ports):
                found.append(f"{name}: {backend['name']} has no port {backend['port']}")
    return found


def _backends(o: Object) -> Iterator[dict[str, Any]]:
    if o["kind"] in ("GRPCRoute", "HTTPRoute"):
        yield from (backend for rule in o["spec"]["rules"] for backend in rule["backendRefs"])
    elif o["kind"] == "Ingress":
        for path in (path for rule in o["spec"]["rules"] for path in rule["http"]["paths"]):
            service = path["backend"]["service"]
            yield {"name": service["name"], "port": service["port"].get("name", service["port"].get("number"))}
