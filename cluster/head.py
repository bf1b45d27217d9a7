"""The head of a cluster: its Ray node, how others find it, and how a successor takes over when it is lost.

A head that others can join keeps its address and token in Redis; with an external Redis, Ray keeps its own state there
too. Then nodes and workers outlive a lost head, and the next one finds them. Ending it on purpose forgets all that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redis.exceptions import RedisError

from cluster.head_record import HeadRecord, HeadRecords
from cluster.placement import RESOURCE
from cluster.ray_environment import new_token, prepare_environment
from cluster.ray_node import GRACE_S, RayNode
from cluster.ray_node_settings import LOOPBACK_IP, NodeOffer, RayStorage
from tandem.errors import ConfigError
from tandem.redis_access import redis_password
from tandem.tasks import cancel_all
from tandem.types import Role

logger = logging.getLogger(__name__)

_RECORD_PERIOD_S = 5.0
AMPLE_SLOTS = 1024
"""Workers of each pool that a node has room for unless told: pools may grow far beyond their first sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """What kind of head. By default one of a cluster of one machine, which nobody joins."""

    joinable: bool = False
    """Other nodes may join; the cluster is up without waiting for workers."""
    node_ip: str = LOOPBACK_IP
    """Address of this machine that other nodes reach."""
    port: int = 0
    """Where nodes join; 0 takes the one of a lost head, else a free one."""
    slots: Mapping[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, AMPLE_SLOTS))
    """Workers of each pool that run on the head itself."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Topology labels of the head's node."""
    has_router: bool = True
    """A router runs beside the head."""
    hands_over: bool = False
    """Ending it leaves nodes and workers to the next head, as losing it does."""
    sizes_file: str = ""
    """A file with the sizes of the pools; see `sizes_file.py`. Empty: none."""

    def __post_init__(self) -> None:
        if self.hands_over and not self.joinable:
            raise ConfigError("a head that nobody joins has nothing to hand over")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.node_ip).is_loopback


def slot_resources(slots: Mapping[Role, int]) -> dict[str, float]:
    """A node's slots as Ray resources; pools without slots are left out."""
    return {RESOURCE[role]: float(number) for role, number in slots.items() if number > 0}


class RayHead:
    """One head. `log` takes Ray's output; None shows it on stderr."""

    def __init__(self, options: HeadOptions, *, cluster: str, log: Path | None) -> None:
        self._options = options
        self._cluster = cluster
        self._node = RayNode(log=log)
        self._records: HeadRecords | None = None
        self._record: HeadRecord | None = None
        self._storage: RayStorage | None = None

    async def start(self, redis_url: str, *, is_external: bool) -> str:
        """Starts it, as the successor of a lost one if there was one; host:port of Ray. Raises TandemError."""
        options = self._options
        if options.joinable and not is_external and not options.is_loopback:
            raise ConfigError(
                "nodes of other machines need a Redis that they reach: give --redis-url", param="registry.redis_url"
            )
        if options.hands_over and not is_external:
            raise ConfigError("a head that hands over needs a Redis that outlives it", param="registry.redis_url")
        lost = None
        if options.joinable:
            self._records = HeadRecords(redis_url, cluster=self._cluster)
            self._storage = RayStorage.from_url(redis_url, password=redis_password()) if is_external else None
            lost = await self._records.get()
        token = lost.token if lost is not None else new_token()
        prepare_environment(token=token, storage_namespace=self._cluster if self._storage is not None else "")
        port = options.port or (lost.port if lost is not None else 0)
        offer = NodeOffer(node_ip=options.node_ip, resources=slot_resources(options.slots), labels=options.labels)
        address = await self._node.start_head(offer, port=port, storage=self._storage)
        if self._records is not None:
            self._record = HeadRecord(address=address.head, token=token)
            await self._records.put(self._record)
        return address.head

    async def supervise(self, note: Callable[[str], None]) -> None:
        """Starts it again, at its address, whenever it dies; until cancelled."""
        keeping = asyncio.create_task(self._keep_record())
        try:
            await self._node.supervise(note)
        finally:
            await cancel_all([keeping])

    async def _keep_record(self) -> None:
        """Redis may lose its memory: then it is told again where the head is."""
        while self._records is not None and self._record is not None:
            try:
                if await self._records.get() is None:
                    await self._records.put(self._record)
            except RedisError as exc:
                logger.debug("nothing is known of the head's record, Redis is away: %s", exc)
            await asyncio.sleep(_RECORD_PERIOD_S)

    async def stop(self, *, timeout_s: float = GRACE_S) -> list[str]:
        """Ends it and, unless it hands over, the cluster. Returns processes that had to be killed. Idempotent."""
        await self._say_ended()
        killed = await self._node.stop(timeout_s=timeout_s)
        if self._storage is not None and not self._options.hands_over:
            storage, self._storage = self._storage, None
            await asyncio.to_thread(_forget, storage, self._cluster)
        return killed

    async def _say_ended(self) -> None:
        records, self._records = self._records, None
        if records is None:
            return
        try:
            if not self._options.hands_over:
                await records.end()
        except RedisError as exc:
            logger.warning("the cluster's nodes were not told of its end, Redis is away: %s", exc)
        finally:
            await records.close()

    def remove_temp_dir(self) -> None:
        """For a forced end only."""
        self._node.remove_temp_dir()


def _forget(storage: RayStorage, cluster: str) -> None:
    """Takes Ray's state of the cluster out of Redis, so that the next head starts afresh."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "warning")  # it would tell the terminal of each step
    from ray._private.gcs_utils import cleanup_redis_storage

    removed = cleanup_redis_storage(
        storage.host,
        storage.port,
        storage.password,
        storage.tls,
        cluster,
        storage.username,
    )
    if not removed:
        logger.warning("Ray's state of cluster %s is still in Redis at %s", cluster, storage.address)
