"""A Ray node as a supervised child: a head, or one that joins a head; ready by handshake, gone without a trace.

Owns the node's short temporary directory and every process of the node, also those that its parent's death orphaned.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from cluster.child import ReportingChild
from cluster.processes import make_temp_dir, marked, sweep
from cluster.ray_node_settings import MARK, NodeOffer, RayAddress, RayNodeSettings, RayStorage
from tandem.errors import ClusterError

START_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 10.0
GRACE_S = 10.0
"""Time in which a node's processes end by themselves, once told to."""
_NO_GRACE_S = 0.3
"""The same for a node that never stood, or has died, and for agents: these notice that only after ten seconds."""
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Beside a raylet. Those that it leaves behind neither heed SIGTERM nor have anything to bring to an end."""
_LONGEST_TEMP_DIR = 40
"""Unix socket paths end at 107 bytes, and Ray's session adds about 65 to the directory."""
_LONGEST_NAME = len("/tandem-ray-4194304-12345678")
_COMMAND = (sys.executable, "-m", "cluster.run_ray_node")


def short_temp_dir() -> Path:
    """A new directory whose path is short enough for Ray's sockets."""
    return make_temp_dir("ray", parent=ray_parent())


def ray_parent() -> Path:
    """Where it lies: the usual place for such, or /tmp where that has too long a path."""
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")
    fits = len(str(usual)) + _LONGEST_NAME <= _LONGEST_TEMP_DIR
    return usual if fits or not short.is_dir() else short


class RayNode:
    """One node at a time; after `stop` it may be started again. `log` takes its output; None shows it on stderr.

    Call `ray_environment.prepare_environment` first.
    """

    def __init__(self, *, log: Path | None = None) -> None:
        self._child = ReportingChild("Ray node", log=log)
        self._temp_dir: Path | None = None
        self._again: Callable[[], Awaitable[RayAddress]] | None = None
        self.address: RayAddress | None = None

    @property
    def temp_dir(self) -> Path | None:
        """Where its session lives, while it does."""
        return self._temp_dir

    async def start_head(self, offer: NodeOffer, *, port: int = 0, storage: RayStorage | None = None) -> RayAddress:
        """Starts a head at `port` (0: a free one). Raises ClusterError; then nothing is left."""
        _require_free(offer.node_ip, port)
        kept: dict[str, Any] = {}
        if storage is not None:
            kept = {"storage": storage.address, "storage_user": storage.username}
        first = await self._start(offer, {"port": port, **kept})
        port = int(first.head.rpartition(":")[2])  # a successor must be where the nodes look
        self._again = lambda: self._start(offer, {"port": port, **kept})
        return first

    async def join(self, head: str, offer: NodeOffer) -> RayAddress:
        """Joins the head at "host:port". Raises ClusterError; then nothing is left."""
        self._again = lambda: self._start(offer, {"head_address": head})
        return await self._again()

    async def _start(self, offer: NodeOffer, more: dict[str, Any]) -> RayAddress:
        self._temp_dir = short_temp_dir()
        settings = RayNodeSettings(
            temp_dir=str(self._temp_dir),
            node_ip=offer.node_ip,
            num_cpus=offer.num_cpus,
            num_gpus=offer.num_gpus,
            resources=dict(offer.resources),
            labels=dict(offer.labels),
            **more,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._child.start([*_COMMAND, "--settings-json", settings.to_json()])
                line = await self._child.line()
        except TimeoutError as exc:
            await self.stop(timeout_s=_NO_GRACE_S)
            raise ClusterError(f"the Ray node did not start within {START_TIMEOUT_S:g} s") from exc
        except BaseException:
            await self.stop(timeout_s=_NO_GRACE_S)
            raise
        self.address = RayAddress(head=line["address"], node_id=line["node_id"])
        return self.address

    async def supervise(self, note: Callable[[str], None]) -> None:
        """Starts the node again, as it was, whenever it dies; until cancelled. Its workers died with it."""
        await self._child.supervise(self._restart, note)

    async def _restart(self) -> None:
        assert self._again is not None
        await self.stop(timeout_s=_NO_GRACE_S)
        await self._again()

    async def drain(self) -> bool:
        """Has Ray place nothing on the node any more; whether the head agreed. What runs there goes on."""
        self._child.signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                return bool((await self._child.line())["draining"])
        except (TimeoutError, ClusterError):
            return False

    def processes(self) -> list[psutil.Process]:
        """All processes of the node, its workers among them."""
        return [] if self._temp_dir is None else marked(MARK, str(self._temp_dir))

    async def stop(self, *, timeout_s: float = GRACE_S) -> list[str]:
        """Ends the node and all its processes. Returns those that had to be killed. Idempotent."""
        if self._temp_dir is None:
            return []
        await self._child.stop(timeout_s=timeout_s)
        await asyncio.to_thread(sweep, self._agents(), timeout_s=_NO_GRACE_S)
        killed = await asyncio.to_thread(sweep, self.processes(), timeout_s=timeout_s)
        self.remove_temp_dir()
        return killed

    def _agents(self) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            try:
                if process.name() in _AGENTS:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def remove_temp_dir(self) -> None:
        """For a forced end only: takes the directory away."""
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None


def _require_free(node_ip: str, port: int) -> None:
    """Ray itself would take half a minute to notice. Raises ClusterError."""
    try:
        with socket.create_server((node_ip, port)):
            return
    except OSError as exc:
        raise ClusterError(f"a head cannot listen on {node_ip}:{port}: {exc.strerror}") from exc

