"""The node: gives every pod of the store a worker, and tells it when its pod is to end."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.kube.addresses import Addresses
from tests.kube.pod_worker import NodeSetting, PodWorker
from tests.kube.pods import POD_API, PODS, is_ending
from tests.kube.store import Key

_LOOK_S = 0.5


class Kubelet:
    """One node, on which all pods run."""

    def __init__(self, setting: NodeSetting, addresses: Addresses) -> None:
        self._setting = setting
        self._addresses = addresses
        self._workers: dict[str, PodWorker] = {}
        self._errors: list[BaseException] = []
        self._number = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def start(self) -> None:
        """In a thread of its own."""
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Ends all pods within so many seconds. Raises what broke a worker, if anything did."""
        self._stopping.set()
        self._thread.join()
        for worker in self._workers.values():
            worker.end(grace_s)
        for worker in self._workers.values():
            worker.join()
        self._forget_ended()
        if self._errors:
            raise self._errors[0]

    def worker(self, uid: str) -> PodWorker:
        """The worker of a pod. Raises KeyError when it has ended."""
        return self._workers[uid]

    def log(self, key: Key, container: str) -> str:
        """What a container of a pod, or its first one, has written."""
        pod = self._setting.store.get(key)
        if pod is None:
            return ""
        name = container or pod["spec"]["containers"][0]["name"]
        path = self.log_path(key, name)
        return path.read_text(errors="replace") if path.exists() else ""

    def log_path(self, key: Key, container: str) -> Path:
        """Where the log is."""
        return self._setting.logs / f"{key.namespace}_{key.name}_{container}.log"

    def _run(self) -> None:
        version = 0
        while not self._stopping.is_set():
            self._look()
            version = max([version, *(event.version for event in self._events_since(version))])

    def _events_since(self, version: int) -> list:  # type: ignore[type-arg]
        return self._setting.store.events_since(version, timeout_s=_LOOK_S)

    def _look(self) -> None:
        pods = self._setting.store.list(POD_API, PODS)
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid not in self._workers:
                self._number += 1
                worker = PodWorker(pod, node=self._setting, pod_ip=self._addresses.take(), number=self._number)
                self._workers[uid] = worker
                worker.start()
            if is_ending(pod):
                self._workers[uid].end()
        self._forget_ended()

    def _forget_ended(self) -> None:
        for uid, worker in list(self._workers.items()):
            if worker.is_over:
                if worker.error is not None:
                    self._errors.append(worker.error)
                del self._workers[uid]
