"""Which components' processes have TCP connections to which, and to what ports: what network policies must allow."""

from __future__ import annotations

import psutil

from tests.kube.kinds import Document
from tests.kube.services import selected_pods, target_port
from tests.kube.stand_in import StandIn

COMPONENT = "app.kubernetes.io/component"
Place = tuple[str, int]


def connections_between_pods(cluster: StandIn) -> set[tuple[str, str, int]]:
    """(component that connected, component that listens, port) of all that are open from one pod to another."""
    pods = {str(pod.get("status", {}).get("podIP")): pod for pod in cluster.store.list("v1", "pods")}
    open_now = [found for found in psutil.net_connections("tcp") if found.pid is not None and found.laddr]
    owners = {pid: pods[ip] for pid in {found.pid for found in open_now} if (ip := _pod_ip(pid)) in pods}
    listening = {tuple(found.laddr): found.pid for found in open_now if found.status == psutil.CONN_LISTEN}
    behind = {place: pods.get(place[0]) or owners.get(pid) for place, pid in listening.items()}
    targets = {place: (pod, place[1]) for place, pod in behind.items() if pod is not None} | _services(cluster)
    between = set()
    for found in open_now:
        source, target = owners.get(found.pid), targets.get(tuple(found.raddr)) if found.raddr else None
        if source is not None and target is not None and _uid(source) != _uid(target[0]):
            between.add((_component(source), _component(target[0]), target[1]))
    return between


def _services(cluster: StandIn) -> dict[Place, tuple[Document, int]]:
    """Behind each port of a Service's cluster address: one of its pods, and that pod's port."""
    found = {}
    for service in cluster.store.list("v1", "services"):
        for pod in selected_pods(cluster.store, service)[:1]:
            for port in service["spec"].get("ports", ()):
                place = (str(service["spec"].get("clusterIP")), int(port["port"]))
                found[place] = (pod, target_port(port, pod))
    return found


def _pod_ip(pid: int) -> str:
    """The address of the pod that a process belongs to; empty where there is none, or the process hides it."""
    try:
        return psutil.Process(pid).environ().get("KUBE_POD_IP", "")
    except psutil.Error:
        return ""


def _uid(pod: Document) -> str:
    return str(pod["metadata"]["uid"])


def _component(pod: Document) -> str:
    return str(pod["metadata"]["labels"][COMPONENT])
