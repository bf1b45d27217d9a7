"""The real chart on a stand-in, with a small model, and what tests ask of it."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.rpc.tandem.v1 import inference_pb2
from tests.e2e.live import cluster_status_at, run
from tests.kube.container import KILLED
from tests.kube.helm import Tools
from tests.kube.images import REPOSITORY
from tests.kube.kinds import Document
from tests.kube.pods import is_ending, is_over, is_ready
from tests.kube.stand_in import StandIn
from tests.kube.waiting import until

CHART = REPOSITORY / "helm" / "tandem"
NAME = "live"
GRPC_PORT, HTTP_PORT = 50051, 8000
_INSTALL_TIMEOUT = "300s"
_SETTLE_S = 300.0
_ASK_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A release of the chart. `values` are the arguments that every upgrade repeats."""

    cluster: StandIn
    tools: Tools
    values: Sequence[str]

    def upgrade(self, *changes: str, wait: bool = True) -> None:
        """`helm upgrade` with other values; with `wait` it returns when the pods are as they should be."""
        waiting = ["--wait", "--timeout", _INSTALL_TIMEOUT] if wait else []
        self.tools.helm("upgrade", NAME, CHART, *self.values, *waiting, *changes)

    def pods(self, component: str) -> list[Document]:
        """The pods of a component that were not asked to end."""
        label = "app.kubernetes.io/component"
        found = self.cluster.store.list("v1", "pods", "default")
        return [pod for pod in found if pod["metadata"]["labels"].get(label) == component and not is_ending(pod)]

    def uids(self, component: str) -> set[str]:
        """Which pods they are."""
        return {pod["metadata"]["uid"] for pod in self.pods(component)}

    def names(self, component: str) -> list[str]:
        """What they are called."""
        return sorted(pod["metadata"]["name"] for pod in self.pods(component))

    def pod_of(self, role: str) -> str:
        """The pod that the first worker of a pool is in."""
        (address, *_) = [worker.address for worker in self.status().workers if worker.role == role]
        pods = self.cluster.store.list("v1", "pods", "default")
        (name,) = [pod["metadata"]["name"] for pod in pods if pod["status"]["podIP"] == address.rpartition(":")[0]]
        return str(name)

    def tags(self, component: str) -> set[str]:
        """The tags of their containers' images."""
        found = [container["image"] for pod in self.pods(component) for container in pod["spec"]["containers"]]
        return {str(image).rpartition(":")[2] for image in found}

    def volumes(self, component: str, name: str) -> list[Path]:
        """The real directories of a volume of a component's pods."""
        return [self.cluster.kubelet.worker(uid).volume(name) for uid in self.uids(component)]

    def secrets(self) -> dict[str, dict[str, str]]:
        """What the release's Secrets hold, by name; Helm's own apart."""
        found = self.cluster.store.list("v1", "secrets", "default")
        ours = [secret for secret in found if secret["metadata"]["name"].startswith(f"{NAME}-")]
        return {secret["metadata"]["name"]: dict(secret["data"]) for secret in ours}

    @property
    def host(self) -> str:
        """The cluster address of the router's Service, as a client resolves it."""
        services = self.cluster.store.list("v1", "services", "default")
        spec = next(found["spec"] for found in services if found["metadata"]["name"].endswith("tandem-router"))
        return str(spec["clusterIP"])

    @property
    def grpc(self) -> str:
        """host:port of the Service."""
        return f"{self.host}:{GRPC_PORT}"

    @property
    def http(self) -> str:
        """Base URL of the Service."""
        return f"http://{self.host}:{HTTP_PORT}"

    def status(self) -> inference_pb2.ClusterStatus:
        """What the router says."""
        return run(cluster_status_at(self.grpc))

    def workers(self, role: str) -> dict[str, int]:
        """Process ids of the ready workers of a pool, by worker id."""
        found = self.status().workers
        return {worker.worker_id: worker.pid for worker in found if (worker.role, worker.state) == (role, "ready")}

    def until_sizes(self, num_prefill: int, num_decode: int) -> None:
        """Waits until the pools have so many workers, and no others."""

        def holds() -> bool:
            states = [(worker.role, worker.state) for worker in self.status().workers]
            return sorted(states) == [("decode", "ready")] * num_decode + [("prefill", "ready")] * num_prefill

        until(holds, timeout_s=_SETTLE_S, what=self.status, look_s=_ASK_S)

    def uninstall(self) -> None:
        """`helm uninstall`, and its pods are gone; only the finished one of `helm test` stays, as helm has it."""
        self.tools.helm("uninstall", NAME, "--wait")

        def is_gone() -> bool:
            return all(is_over(pod) for pod in self.cluster.store.list("v1", "pods"))

        until(is_gone, timeout_s=_SETTLE_S, what=lambda: self.tools.kubectl("get", "pods", "-o", "wide"))

    def killed(self) -> list[str]:
        """Logs of containers that did not end in the time they were given."""
        return [path.name for path in self.cluster.logs.glob("*.log") if KILLED in path.read_text(errors="replace")]

    def until_settled(self, component: str, num_pods: int) -> None:
        """Waits until a component has so many pods, all of them ready and none on its way out."""

        def holds() -> bool:
            label = "app.kubernetes.io/component"
            found = self.cluster.store.list("v1", "pods", "default")
            ours = [pod for pod in found if pod["metadata"]["labels"].get(label) == component]
            return len(ours) == num_pods and all(is_ready(pod) and not is_ending(pod) for pod in ours)

        until(holds, timeout_s=_SETTLE_S, what=lambda: self.tools.kubectl("get", "pods", "-o", "wide"))


def installed(cluster: StandIn, tools: Tools, model: Path, *arguments: str) -> Deployment:
    """Installs the chart with a model that lies on the node. Returns when helm says that everything is ready."""
    volume = [f"model.volume.path={model.parent}", "model.volume.type=hostPath", f"model.source=/models/{model.name}"]
    values = [*arguments, *(word for setting in volume for word in ("--set", setting))]
    tools.helm("install", NAME, CHART, *values, "--wait", "--timeout", _INSTALL_TIMEOUT)
    return Deployment(cluster=cluster, tools=tools, values=values)


def metrics_of(cluster: StandIn) -> dict[str, str]:
    """The pages of all ports named for metrics, and of the router's HTTP port, by pod."""
    pages = {}
    for pod in cluster.store.list("v1", "pods", "default"):
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                if "metrics" in port["name"] or (container["name"] == "router" and port["name"] == "http"):
                    url = f"http://{pod['status']['podIP']}:{port['containerPort']}/metrics"
                    with urllib.request.urlopen(url, timeout=10) as page:
                        pages[pod["metadata"]["name"]] = page.read().decode()
    return pages

