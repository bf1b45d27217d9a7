"""One pod on the node, in a thread of its own: volumes, init containers, containers, restarts, status, and the end."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kube import pod_status
from tests.kube.container import Container, Setting
from tests.kube.images import ImageStore
from tests.kube.pod_env import Lookup, NotThere, environment
from tests.kube.pod_volumes import PodVolumes
from tests.kube.pods import key_of
from tests.kube.store import Store

_LOOK_S = 0.05
_REFRESH_S = 0.5
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 10.0
_DEFAULT_GRACE_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSetting:
    """What all pods of the node share. `hosts` has a file of names for each namespace."""

    store: Store
    images: ImageStore
    directory: Path
    hosts: Path
    logs: Path
    longest_period_s: float


SHARED_PLACES = ("/dev/shm", "/tmp")
"""Mounts that are this machine's own. Programs find a container's temporary directory by $TMPDIR."""


def mount_lines(mounts: Mapping[str, Path]) -> str:
    """What `pod_files.c` reads: mount path and real path, the longest first."""
    places = sorted(mounts, key=len, reverse=True)
    return "\n".join(f"{place} {mounts[place]}" for place in places if not place.startswith(SHARED_PLACES))


class PodWorker:
    """Runs a pod from its creation to its removal from the store."""

    def __init__(self, pod: Mapping[str, Any], *, node: NodeSetting, pod_ip: str, number: int) -> None:
        self.pod_ip = pod_ip
        self._pod = dict(pod)
        self._key = key_of(pod)
        self._node = node
        self._directory = node.directory / str(number)  # short: sockets of Unix have at most 107 letters
        self._lookup = Lookup(store=node.store, pod=self._pod, pod_ip=pod_ip)
        self._volumes = PodVolumes(
            self._lookup, root=self._directory / "v", claims=node.directory / "claims" / self._key.namespace
        )
        self.init: list[Container] = []
        self.main: list[Container] = []
        self._stopping = threading.Event()
        self._grace_s = float(pod["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S))
        self._thread = threading.Thread(target=self._run, name=f"pod {self._key.name}")
        self._shown: tuple[object, ...] = ()
        self.error: BaseException | None = None

    def volume(self, name: str) -> Path:
        """The real directory of one of its volumes. Raises NotThere."""
        return self._volumes.place(name)

    def start(self) -> None:
        """In its own thread."""
        self._thread.start()

    def end(self, grace_s: float | None = None) -> None:
        """Asks it to end, in so many seconds if they are fewer than the pod's own. Does not wait."""
        if grace_s is not None:
            self._grace_s = min(self._grace_s, grace_s)
        self._stopping.set()

    def join(self) -> None:
        """Returns when nothing of the pod is left."""
        self._thread.join()

    @property
    def is_over(self) -> bool:
        """Whether nothing of the pod is left."""
        return not self._thread.is_alive()

    # --- the thread

    def _run(self) -> None:
        try:
            self._live()
        except BaseException as exc:  # kept for whoever owns the kubelet: a thread has nobody to raise it to
            self.error = exc
        finally:
            self._terminate()
            shutil.rmtree(self._directory, ignore_errors=True)
            self._node.store.remove(self._key)

    def _live(self) -> None:
        self._say("Pending")
        if not self._prepare() or not self._run_init_containers():
            return
        for container in self.main:
            container.start()
        self._watch_over()

    def _prepare(self) -> bool:
        """Makes volumes and containers, as soon as all they refer to is there; False when asked to end before."""
        self._directory.mkdir(parents=True)
        while not self._stopping.is_set():
            try:
                self._volumes.update()
                spec = self._pod["spec"]
                self.init = [self._make(container) for container in spec.get("initContainers", ())]
                self.main = [self._make(container) for container in spec["containers"]]
                return True
            except NotThere as exc:
                self._write_log("pod", f"waiting: {exc}\n")
                self._stopping.wait(_REFRESH_S)
        return False

    def _write_log(self, container: str, text: str) -> None:
        with self._log_path(container).open("a") as log:
            log.write(text)

    def _log_path(self, container: str) -> Path:
        return self._node.logs / f"{self._key.namespace}_{self._key.name}_{container}.log"

    def _make(self, spec: Mapping[str, Any]) -> Container:
        directory = self._directory / spec["name"]
        mounts = self._volumes.mounts_of(spec)
        temporary = self._temporary_directory(directory, mounts)
        home = directory / "home"
        home.mkdir(parents=True, exist_ok=True)
        env = {
            **self._node.images.environment(),
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "HOSTNAME": self._pod["spec"].get("hostname", self._key.name),
            "KUBE_POD_IP": self.pod_ip,
            "KUBE_HOSTS_FILE": str(self._node.hosts / self._key.namespace),
            "KUBE_MOUNTS": mount_lines(mounts),
            **environment(spec, self._lookup),
        }
        return Container(
            spec,
            Setting(
                pod_uid=self._pod["metadata"]["uid"],
                pod_ip=self.pod_ip,
                env=env,
                directory=directory,
                log=self._log_path(spec["name"]),
                longest_period_s=self._node.longest_period_s,
            ),
        )

    def _temporary_directory(self, directory: Path, mounts: Mapping[str, Path]) -> Path:
        """The container's /tmp: a volume where one is mounted there, and in it what is mounted below."""
        temporary = mounts.get("/tmp", directory / "tmp")
        temporary.mkdir(parents=True, exist_ok=True)
        for place, real in mounts.items():
            if place.startswith("/tmp/") and not (link := temporary / place.removeprefix("/tmp/")).exists():
                link.symlink_to(real)
        return temporary

    def _run_init_containers(self) -> bool:
        """One after the other, each to its end; sidecars only until they have started. False when it failed."""
        for container in self.init:
            container.start()
            is_sidecar = container.spec.get("restartPolicy") == "Always"
            while not (container.is_started if is_sidecar else container.poll() == 0):
                if self._stopping.wait(_LOOK_S):
                    return False
                if container.poll() not in (None, 0) and not is_sidecar and self._restart_policy == "Never":
                    self._say("Failed")
                    self._stopping.wait()
                    return False
                if is_sidecar or container.exit_status != 0:
                    self._restart_if_due(container)
                self._say("Pending")
        return True

    @property
    def _restart_policy(self) -> str:
        return str(self._pod["spec"].get("restartPolicy", "Always"))

    def _watch_over(self) -> None:
        refreshed_s = time.monotonic()
        while not self._stopping.is_set():
            sidecars = [container for container in self.init if container.spec.get("restartPolicy") == "Always"]
            phase = pod_status.phase(self.main, self._restart_policy)
            self._say(phase)
            if phase in ("Succeeded", "Failed"):
                self._stop_all(sidecars, self._grace_s)
                self._stopping.wait()
                return
            for container in [*sidecars, *self.main]:
                self._look_after(container)
            if time.monotonic() - refreshed_s > _REFRESH_S:
                refreshed_s = time.monotonic()
                self._refresh()
            self._stopping.wait(_LOOK_S)

    def _refresh(self) -> None:
        try:
            self._volumes.update()
        except NotThere as exc:
            self._write_log("pod", f"volumes stay as they are: {exc}\n")

    def _look_after(self, container: Container) -> None:
        if container.should_restart:
            self._write_log(container.name, "stopped: a probe has given it up\n")
            container.stop(self._grace_s)
        container.poll()
        self._restart_if_due(container)

    def _restart_if_due(self, container: Container) -> None:
        """A container that has ended starts again, later and later, where its policy says so."""
        if container.exit_status is None:
            return
        policy = container.spec.get("restartPolicy", self._restart_policy)
        if policy == "Never" or (policy == "OnFailure" and container.exit_status == 0):
            return
        backoff_s = min(_FIRST_BACKOFF_S * 2 ** (container.num_starts - 1), _LONGEST_BACKOFF_S)
        if time.monotonic() - container.ended_s >= backoff_s:
            container.start()

    def _say(self, phase: str) -> None:
        """Writes the status, when it would be another than the last one."""
        shown = (phase, *(container.shown for container in [*self.init, *self.main]))
        if shown == self._shown:
            return
        self._shown = shown
        current = self._node.store.get(self._key)
        if current is not None:
            status = pod_status.pod_status(
                current, phase=phase, pod_ip=self.pod_ip, init=self.init, main=self.main
            )
            self._node.store.set_status(self._key, status)

    # --- the end

    def _terminate(self) -> None:
        began_s = time.monotonic()
        self._stop_all(self.main, self._grace_s)
        self._stop_all(reversed(self.init), max(1.0, self._grace_s - (time.monotonic() - began_s)))

    def _stop_all(self, containers: Iterable[Container], grace_s: float) -> None:
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(container.stop, grace_s) for container in containers]:
                done.result()
