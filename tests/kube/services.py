"""Services: their cluster addresses, their endpoints (ready pods alone), and the names under which pods find both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kube.addresses import Addresses
from tests.kube.kinds import Document
from tests.kube.pods import POD_API, PODS, is_ending, is_over, is_ready, reference
from tests.kube.selection import labels_of
from tests.kube.store import Key, Store

HEADLESS = "None"
_DOMAIN = "svc.cluster.local"


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Where connections to one port of a Service's cluster address go: (pod address, port) of each ready pod."""

    address: str
    port: int
    targets: tuple[tuple[str, int], ...]


def reconcile_services(store: Store, addresses: Addresses) -> None:
    """Gives addresses to new Services, and says in Endpoints which pods are ready."""
    for service in store.list("v1", "services"):
        if "clusterIP" not in service["spec"] and service["spec"].get("type") != "ExternalName":
            address = addresses.take()
            key = _key(service, "services")
            service = store.update(key, lambda old, ip=address: _with_address(old, ip))  # type: ignore[misc]
        if service["spec"].get("selector"):
            _put_endpoints(store, service)


def _with_address(service: Document, address: str) -> Document:
    return {**service, "spec": {**service["spec"], "clusterIP": address, "clusterIPs": [address]}}


def _key(document: Mapping[str, Any], plural: str) -> Key:
    metadata = document["metadata"]
    return Key(api="v1", plural=plural, namespace=metadata["namespace"], name=metadata["name"])


def selected_pods(store: Store, service: Mapping[str, Any]) -> list[Document]:
    """The pods behind a Service that have an address and have not ended."""
    wanted = service["spec"].get("selector") or {}
    return [
        pod
        for pod in store.list(POD_API, PODS, service["metadata"]["namespace"])
        if wanted.items() <= labels_of(pod).items() and not is_over(pod) and pod.get("status", {}).get("podIP")
    ]


def serves(pod: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Whether a Service sends anybody to this pod."""
    return bool(service["spec"].get("publishNotReadyAddresses")) or (is_ready(pod) and not is_ending(pod))


def _put_endpoints(store: Store, service: Document) -> None:
    pods = selected_pods(store, service)
    ready = [_address(pod) for pod in pods if serves(pod, service)]
    other = [_address(pod) for pod in pods if not serves(pod, service)]
    subset: Document = {"ports": [_endpoint_port(port, pods) for port in service["spec"].get("ports", ())]}
    subset |= {"addresses": ready} if ready else {}
    subset |= {"notReadyAddresses": other} if other else {}
    subsets = [subset] if ready or other else []
    key = _key(service, "endpoints")
    if store.get(key) is None:
        metadata = {"name": key.name, "ownerReferences": [reference(service)]}
        store.create(key, {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets})
    else:
        store.update(key, lambda old: {**old, "subsets": subsets})


def _address(pod: Document) -> Document:
    target = {"kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    return {"ip": pod["status"]["podIP"], "targetRef": target}


def _endpoint_port(port: Document, pods: list[Document]) -> Document:
    number = target_port(port, pods[0]) if pods else port["port"]
    name = {"name": port["name"]} if "name" in port else {}
    return {"port": number, "protocol": port.get("protocol", "TCP"), **name}


def target_port(port: Mapping[str, Any], pod: Mapping[str, Any]) -> int:
    """The number of a Service's target port in a pod. Raises LookupError when no container has a port of that name."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
        for found in container.get("ports", ()):
            if found.get("name") == target:
                return int(found["containerPort"])
    raise LookupError(f"pod {pod['metadata']['name']} has no port named {target}")


def backends(store: Store) -> Iterator[Backend]:
    """All that the proxies of cluster addresses need to know."""
    for service in store.list("v1", "services"):
        address = service["spec"].get("clusterIP", HEADLESS)
        if address == HEADLESS:
            continue
        pods = [pod for pod in selected_pods(store, service) if serves(pod, service)]
        for port in service["spec"].get("ports", ()):
            targets = tuple((pod["status"]["podIP"], target_port(port, pod)) for pod in pods)
            yield Backend(address=address, port=port["port"], targets=targets)


def write_hosts(store: Store, directory: Path) -> None:
    """One file of names for each namespace, as its resolver has them; replaced whole when it changes."""
    services = store.list("v1", "services")
    names = [(service, list(_names(store, service))) for service in services]
    for namespace in {service["metadata"]["namespace"] for service in services}:
        lines = []
        for service, found in names:
            is_near = service["metadata"]["namespace"] == namespace
            lines += [f"{ip} {host}" for ip, long_names in found for host in _spelled(long_names, namespace, is_near)]
        _replace(directory / namespace, "".join(f"{line}\n" for line in sorted(set(lines))))


def _names(store: Store, service: Document) -> Iterator[tuple[str, str]]:
    """(address, name without its domain) of a Service, and of its pods where they have names."""
    name, namespace, spec = service["metadata"]["name"], service["metadata"]["namespace"], service["spec"]
    pods = [pod for pod in selected_pods(store, service) if serves(pod, service)]
    if spec.get("clusterIP", HEADLESS) != HEADLESS:
        yield spec["clusterIP"], f"{name}.{namespace}"
    else:
        for pod in pods:
            yield pod["status"]["podIP"], f"{name}.{namespace}"
    for pod in pods:
        if pod["spec"].get("subdomain") == name and "hostname" in pod["spec"]:
            yield pod["status"]["podIP"], f"{pod['spec']['hostname']}.{name}.{namespace}"


def _spelled(name: str, namespace: str, is_near: bool) -> list[str]:
    """Every way to write a name: short ones only from its own namespace."""
    spellings = [name, f"{name}.svc", f"{name}.{_DOMAIN}", f"{name}.{_DOMAIN}."]
    return [*spellings, name.removesuffix(f".{namespace}")] if is_near else spellings


def _replace(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)
