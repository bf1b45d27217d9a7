"""A node that joins a cluster and offers it slots: `tandem start --address`. Starts no worker itself.

It joins again when its Ray node dies, leaves by having its workers moved elsewhere, and ends when the head ends the
cluster. A head that is only lost does not concern it: its workers go on, and the next head finds them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from redis.exceptions import RedisError

from cluster.embedded_redis import check_redis
from cluster.head_record import HeadRecord, HeadRecords
from cluster.processes import kill_children, make_temp_dir
from cluster.ray_environment import prepare_environment
from cluster.ray_node import RayNode
from cluster.ray_node_settings import NodeOffer
from tandem.config import ClusterConfig
from tandem.errors import ClusterError, ConfigError
from tandem.key_source import hand_down, load_key
from tandem.pool_state import PoolState
from tandem.registry import Registry, WorkerRecord
from tandem.tasks import cancel_all, raise_if_cancelled
from tandem.types import WorkerId

_LEAVE_MARGIN_S = 30.0
"""Time, beyond the drain, for successors of this node's workers to become ready elsewhere."""
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberInfo:
    """A node that has joined, as the ready file has it."""

    head: str
    node_id: str
    node_ip: str
    total_s: float

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2) + "\n"


class Member:
    """One node; also an async context manager that joins and leaves. `note` is told what happens."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        address: str,
        offer: NodeOffer,
        note: Callable[[str], None],
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
        await check_redis(self._config.registry.redis_url)
        prepare_environment(token=(await self._head()).token)
        address = await self._node.join(self._address, self._offer)
        self._joined = True
        return MemberInfo(
            head=address.head,
            node_id=address.node_id,
            node_ip=self._offer.node_ip,
            total_s=time.monotonic() - began_s,
        )

    async def _head(self) -> HeadRecord:
        record = await self._heads.get()
        if record is None:
            raise ClusterError(f"cluster {self._config.cluster} has no head in this Redis; start it with --head")
        if record.address != self._address:
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
            if not await self._node.drain():
                left = [record.worker_id for record in await self._workers_here()]
                _cut_off(left, "the head did not answer")
                return
            async with asyncio.timeout(self._config.drain_timeout_s + _LEAVE_MARGIN_S):
                await self._move_workers(left)
        except TimeoutError:
            _cut_off(left, "they had not left in time")
        except RedisError as exc:
            raise ClusterError(f"this node's workers were cut off, Redis is away: {exc}") from exc

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
            killed = await self._node.stop()
        finally:
            await asyncio.gather(self._heads.close(), self._state.close(), self._registry.close())
            shutil.rmtree(self._run_dir, ignore_errors=True)
        if killed and self._joined:
            self._note(f"these processes did not end by themselves and were killed: {', '.join(killed)}")

    def force_stop(self) -> None:
        """Kills everything at once; nothing is moved. The process should exit right after."""
        kill_children()
        self._node.remove_temp_dir()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def _cut_off(workers: list[WorkerId], why: str) -> None:
    if workers:
        raise ClusterError(f"workers of this node were cut off, {why}: {', '.join(workers)}")
