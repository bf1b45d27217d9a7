"""A node that joins a cluster and offers it slots: `tandem start --address`. Starts no worker itself.

It joins again when its Ray node dies, leaves by having its workers moved elsewhere, and ends when the head ends the
cluster. A head that is only lost does not concern it: its workers go on, and the next head finds them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from redis.exceptions import RedisError

from cluster.embedded_redis import check_redis
from cluster.federation import serve_node_metrics
from cluster.head_record import HeadRecord, HeadRecords
from cluster.patience import patiently
from cluster.processes import kill_children, make_temp_dir
from cluster.ray_environment import prepare_environment
from cluster.ray_node import RayNode
from cluster.ray_node_settings import NodeOffer
from tandem.config import ClusterConfig
from tandem.errors import ClusterError, ConfigError
from tandem.key_source import hand_down, load_key
from tandem.observability.server import MetricsServer
from tandem.pool_state import PoolState
from tandem.prefix_store.registry import StoreRegistry
from tandem.registry import Registry, WorkerRecord
from tandem.tasks import cancel_all, raise_if_cancelled
from tandem.types import WorkerId

_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberInfo:
    """A node that has joined, as the ready file has it."""

    head: str
    node_id: str
    node_ip: str
    total_s: float
    metrics: str = ""
    """URL of its page; empty when there is none."""

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2) + "\n"


class Member:
    """One node; also an async context manager that joins and leaves. `note` is told what happens.

    With `metrics_port` (0: a free one) it serves the metrics of its workers.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        address: str,
        offer: NodeOffer,
        note: Callable[[str], None],
        metrics_port: int | None = None,
        verbose: bool = False,
    ) -> None:
        url = config.registry.redis_url
        if not url:
            raise ConfigError("a node that joins needs the cluster's Redis: give --redis-url", param="redis_url")
        self._config = config
        self._address = address
        self._offer = offer
        self._note = note
        self._run_dir = make_temp_dir("run")
        self._node = RayNode(log=None if verbose else self._run_dir / "ray.log")
        self._heads = HeadRecords(url, cluster=config.cluster)
        self._state = PoolState(url, cluster=config.cluster)
        self._registry = Registry(url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
        self._stores = StoreRegistry(url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
        self._metrics_port = metrics_port
        self._metrics: MetricsServer | None = None
        self._joined = False
        self._is_over = False

    async def __aenter__(self) -> MemberInfo:
        try:
            return await self._join()
        except BaseException:
            await self._close()
            raise

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._joined and not self._is_over:
                await self._leave()
        finally:
            await self._close()

    async def _join(self) -> MemberInfo:
        began_s = time.monotonic()
        hand_down(load_key(self._config))
        await patiently(lambda: check_redis(self._config.registry.redis_url), self._note)
        prepare_environment(token=(await patiently(self._head, self._note)).token)
        address = await self._node.join(self._address, self._offer)
        self._joined = True
        await self._serve_metrics()
        return MemberInfo(
            head=address.head,
            node_id=address.node_id,
            node_ip=self._offer.node_ip,
            total_s=time.monotonic() - began_s,
            metrics="" if self._metrics is None else self._metrics.url,
        )

    async def _serve_metrics(self) -> None:
        if self._metrics_port is not None:
            node_ip = self._offer.node_ip
            self._metrics = await serve_node_metrics(
                self._registry, self._stores, node_ip=node_ip, port=self._metrics_port
            )

    async def _head(self) -> HeadRecord:
        record = await self._heads.get()
        if record is None:
            raise ClusterError(f"cluster {self._config.cluster} has no head in this Redis; start it with --head")
        if _is_ip(self._address) and record.address != self._address:  # a name may stand for it
            raise ClusterError(f"the head of cluster {self._config.cluster} is at {record.address}: give that address")
        return record

    async def serve(self) -> None:
        """Stays in the cluster; returns when the head has ended it."""
        supervising = asyncio.create_task(self._node.supervise(self._note))
        try:
            await self._until_over()
            self._is_over = True
            self._note("the head has ended the cluster")
        finally:
            await cancel_all([supervising])

    async def _until_over(self) -> None:
        while True:
            try:
                async for _ in self._heads.endings():
                    return
            except RedisError:
                await asyncio.sleep(_POLL_S)  # the pace of connecting again; nothing is decided without Redis
                raise_if_cancelled()  # redis-py swallows that while it connects

    # --- leaving

    async def _leave(self) -> None:
        """Has the controller move this node's workers; raises ClusterError when some were cut off."""
        left: list[WorkerId] = []
        try:
            async with asyncio.timeout(self._config.drain_timeout_s + self._config.replacement_timeout_s):
                await self._close_node()
                await self._move_workers(left)
        except TimeoutError:
            _cut_off(left, "they had not left in time")
        except RedisError as exc:
            raise ClusterError(f"this node's workers were cut off, Redis is away: {exc}") from exc

    async def _close_node(self) -> None:
        """Returns when Ray's head has closed it to new workers, or there are none to move; a head may be on its way."""
        told = False
        while not await self._node.drain():
            if not await self._workers_here():
                return
            if not told:
                self._note("the head does not answer; waiting for it, so that this node's workers can be moved")
                told = True
            await asyncio.sleep(_POLL_S)

    async def _move_workers(self, left: list[WorkerId]) -> None:
        """Returns when no worker runs here. `left` always has those that do."""
        asked: set[WorkerId] = set()
        while True:
            left[:] = [record.worker_id for record in await self._workers_here()]
            if not left:
                return
            for worker_id in set(left) - asked:
                await self._state.ask_drain(worker_id)
            asked |= set(left)
            await asyncio.sleep(_POLL_S)

    async def _workers_here(self) -> list[WorkerRecord]:
        pids = {process.pid for process in self._node.processes()}
        host = socket.gethostname()
        return [r for r in await self._registry.workers() if r.pid in pids and r.node in ("", host)]

    async def _close(self) -> None:
        try:
            if self._metrics is not None:
                await self._metrics.stop()
            killed = await self._node.stop()
        finally:
            await asyncio.gather(*(each.close() for each in (self._heads, self._state, self._registry, self._stores)))
            shutil.rmtree(self._run_dir, ignore_errors=True)
        if killed and self._joined:
            self._note(f"these processes did not end by themselves and were killed: {', '.join(killed)}")

    def force_stop(self) -> None:
        """Kills everything at once; nothing is moved. The process should exit right after."""
        kill_children()
        self._node.remove_temp_dir()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def _is_ip(address: str) -> bool:
    """Whether "host:port" has an address for its host, not a name."""
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


def _cut_off(workers: list[WorkerId], why: str) -> None:
    if workers:
        raise ClusterError(f"workers of this node were cut off, {why}: {', '.join(workers)}")
