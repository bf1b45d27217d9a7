"""A Kubernetes cluster of one node in this process: API server, controllers, kubelet and proxies over one store.

Pods are processes of this machine, on loopback addresses of their own. No isolation: users, limits, capabilities,
network policies and read-only file systems of a spec are validated and then not enforced.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.kube.addresses import Addresses
from tests.kube.api_server import ApiServer
from tests.kube.controllers import ControllerManager
from tests.kube.images import ImageStore
from tests.kube.kinds import Document
from tests.kube.kubelet import Kubelet
from tests.kube.pod_worker import NodeSetting
from tests.kube.rayclusters import reconcile_ray_clusters
from tests.kube.service_proxy import ServiceProxy
from tests.kube.services import backends, reconcile_services, write_hosts
from tests.kube.store import Key, Store
from tests.kube.upkeep import bind_claims, collect_garbage, count_for_budgets
from tests.kube.workloads import reconcile_deployments, reconcile_jobs, reconcile_stateful_sets

LONGEST_PERIOD_S = 1.0
"""Probes ask at least so often, whatever their period, so that tests need not wait for them."""
_LAST_GRACE_S = 5.0


class StandIn:
    """Everything, put together. `definitions` are files of CustomResourceDefinitions."""

    def __init__(self, *, definitions: Sequence[Path] = (), logs: Path) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kube-", dir="/tmp"))
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.store = Store()
        for path in definitions:
            for document in yaml.safe_load_all(path.read_text()):
                if document and document["kind"] == "CustomResourceDefinition":
                    self.store.kinds.add_definition(document)
        self.addresses = Addresses()
        setting = NodeSetting(
            store=self.store,
            images=ImageStore(self.directory / "image"),
            directory=self.directory,
            hosts=self.directory / "hosts",
            logs=logs,
            longest_period_s=LONGEST_PERIOD_S,
        )
        self.kubelet = Kubelet(setting, self.addresses)
        self.api = ApiServer(self.store, host=self.addresses.api_server, log_of=self.kubelet.log)
        self._proxy = ServiceProxy()
        self._controllers = ControllerManager(
            self.store,
            [
                lambda: collect_garbage(self.store),
                lambda: bind_claims(self.store),
                lambda: reconcile_deployments(self.store),
                lambda: reconcile_stateful_sets(self.store),
                lambda: reconcile_jobs(self.store),
                lambda: reconcile_ray_clusters(self.store),
                lambda: reconcile_services(self.store, self.addresses),
                lambda: write_hosts(self.store, setting.hosts),
                lambda: self._proxy.update(backends(self.store)),
                lambda: count_for_budgets(self.store),
            ],
        )

    def start(self) -> None:
        """Serves from here on."""
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}
        self.store.create(Key(api="v1", plural="namespaces", namespace="", name="default"), namespace)
        self._proxy.start()
        self.api.start()
        self._controllers.start()
        self.kubelet.start()

    def stop(self) -> None:
        """Ends all pods and takes everything away. Raises what went wrong in a thread, if anything did."""
        try:
            self._controllers.stop()
        finally:
            try:
                self.kubelet.stop(_LAST_GRACE_S)
            finally:
                self._proxy.stop()
                self.store.close()
                self.api.stop()
                self.addresses.close()
                shutil.rmtree(self.directory)

    def kubeconfig(self, path: Path) -> Path:
        """Writes a file with which helm and kubectl find the cluster."""
        named: list[Document] = [{"name": "stand-in", "cluster": {"server": self.api.url}}]
        context: dict[str, Any] = {"cluster": "stand-in", "user": "anyone", "namespace": "default"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": named,
            "users": [{"name": "anyone", "user": {}}],
            "contexts": [{"name": "stand-in", "context": context}],
            "current-context": "stand-in",
        }
        path.write_text(yaml.safe_dump(config))
        return path


@contextmanager
def stand_in(logs: Path, *, definitions: Sequence[Path] = ()) -> Iterator[StandIn]:
    """A cluster that lives for the length of a block."""
    cluster = StandIn(definitions=definitions, logs=logs)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
