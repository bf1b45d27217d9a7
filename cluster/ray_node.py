"""A Ray node as a supervised child: a head, or one that joins a head; ready by handshake, gone without a trace.

Owns the node's short temporary directory and every process of the node, also those that its parent's death orphaned.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

from cluster.child import ReportingChild
from cluster.processes import make_temp_dir, marked, sweep
from cluster.ray_node_settings import MARK, NodeOffer, RayAddress, RayNodeSettings, RayStorage
from tandem.errors import ClusterError

START_TIMEOUT_S = 60.0
_GRACE_S = 10.0
"""Time in which a node's processes end by themselves, once told to."""
_LONGEST_TEMP_DIR = 40
"""Unix socket paths end at 107 bytes, and Ray's session adds about 65 to the directory."""
_COMMAND = (sys.executable, "-m", "cluster.run_ray_node")


def short_temp_dir() -> Path:
    """A new directory whose path is short enough for Ray's sockets."""
    path = make_temp_dir("ray")
    if len(str(path)) <= _LONGEST_TEMP_DIR or not Path("/tmp").is_dir():
        return path
    path.rmdir()
    return make_temp_dir("ray", parent=Path("/tmp"))


class RayNode:
    """One node at a time; after `stop` it may be started again. `log` takes its output; None shows it on stderr.

    Call `ray_environment.prepare_environment` first.
    """

    def __init__(self, *, log: Path | None = None) -> None:
        self._child = ReportingChild("Ray node", log=log)
        self._temp_dir: Path | None = None
        self.address: RayAddress | None = None

    @property
    def temp_dir(self) -> Path | None:
        """Where its session lives, while it does."""
        return self._temp_dir

    async def start_head(self, offer: NodeOffer, *, port: int = 0, storage: RayStorage | None = None) -> RayAddress:
        """Starts a head at `port` (0: a free one). Raises ClusterError; then nothing is left."""
        kept: dict[str, Any] = {}
        if storage is not None:
            kept = {
                "storage": storage.address,
                "storage_user": storage.username,
                "storage_password": storage.password,
            }
        return await self._start(offer, {"port": port, **kept})

    async def join(self, head: str, offer: NodeOffer) -> RayAddress:
        """Joins the head at "host:port". Raises ClusterError; then nothing is left."""
        return await self._start(offer, {"head_address": head})

    async def _start(self, offer: NodeOffer, more: dict[str, Any]) -> RayAddress:
        self._temp_dir = short_temp_dir()
        settings = RayNodeSettings(
            temp_dir=str(self._temp_dir),
            node_ip=offer.node_ip,
            num_cpus=offer.num_cpus,
            resources=dict(offer.resources),
            labels=dict(offer.labels),
            **more,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._child.start([*_COMMAND, "--settings-json", settings.to_json()])
                line = await self._child.line()
        except TimeoutError as exc:
            await self.stop()
            raise ClusterError(f"the Ray node did not start within {START_TIMEOUT_S:g} s") from exc
        except BaseException:
            await self.stop()
            raise
        self.address = RayAddress(head=line["address"], node_id=line["node_id"])
        return self.address

    async def wait(self) -> int:
        """Returns the exit status when the node ends."""
        return await self._child.wait()

    async def stop(self, *, timeout_s: float = _GRACE_S) -> list[str]:
        """Ends the node and all its processes. Returns those that had to be killed. Idempotent."""
        if self._temp_dir is None:
            return []
        processes = marked(MARK, str(self._temp_dir))
        await self._child.stop(timeout_s=timeout_s)
        killed = await asyncio.to_thread(sweep, processes, timeout_s=timeout_s)
        self.remove_temp_dir()
        return killed

    def remove_temp_dir(self) -> None:
        """For a forced end only: takes the directory away."""
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None

